"""Build the source archive and, from it, the wheel: what `make dist` runs. Nothing is fetched.

From a copy, without git and without links: building in place would leave a gfdit.egg-info in the repository, which
shadows the installed entry points for any Python that is started there.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("gfdit", "policies", "sim")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both (default: dist)")
    out: Path = parser.parse_args().out
    for made in build(out):
        print(made)
    return 0


def build(out: Path) -> tuple[Path, Path]:
    """The archive and the wheel, in ``out``. Raises ``CalledProcessError`` with what the backend has printed."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        copy_sources(tree)
        archive = _backend("sdist", tree, out.resolve())
        with tarfile.open(archive) as opened:
            opened.extractall(Path(scratch) / "unpacked", filter="data")
        (unpacked,) = (Path(scratch) / "unpacked").iterdir()
        return archive, _backend("wheel", unpacked, out.resolve())


def copy_sources(tree: Path) -> None:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for link in [path for path in (tree / "gfdit").iterdir() if path.is_symlink()]:
        link.unlink()
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def _backend(what: str, tree: Path, out: Path) -> Path:
    """`what` is sdist or wheel."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{what}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, out], cwd=tree, check=True, capture_output=True)
    pattern = "gfdit-*.tar.gz" if what == "sdist" else "gfdit-*.whl"
    return max(out.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


if __name__ == "__main__":
    sys.exit(main())
