"""Make the development environment `.venv`: what `make setup` runs. Standard library only.

Without an accelerator: a pinned CPU environment known to serve. With one: torch, vLLM and vLLM-Omni are the
user's own. They are used as they are, through a `.venv` that sees them, and never installed or replaced.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gfdit.omni.plugin import find_accelerator  # noqa: E402 (needs the path above; imports nothing heavy)

MIN_PYTHON = (3, 11)
REQUIREMENTS = ROOT / "requirements"
STAMP_NAME = ".gfdit-setup"

# Run by the new environment's Python: distributions it sees, the first of a name, as `name==version`; not those
# that every environment has of its own.
LIST_DISTRIBUTIONS = """
import importlib.metadata as m
seen = {"gfdit", "pip", "setuptools"}
for d in m.distributions():
    name = (d.metadata["Name"] or "").lower().replace("_", "-")
    if name and name not in seen:
        seen.add(name)
        print(name + "==" + d.version)
"""


class SetupError(Exception):
    """Something the user has to provide; the message is the one line they need."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment (default: .venv)")
    target: Path = parser.parse_args().venv
    started_s = time.monotonic()
    try:
        if set_up(target):
            print(f"setup: {target} is ready ({time.monotonic() - started_s:.0f} s)")
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(target: Path) -> bool:
    """Bring `target` up to date; returns whether there was anything to do."""
    if sys.version_info < MIN_PYTHON:
        raise SetupError(f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed, this is {sys.version}")
    accelerator = find_accelerator()
    stamp, wanted = target / STAMP_NAME, _fingerprint(accelerator)
    if stamp.exists() and stamp.read_text() == wanted:
        stamp.touch()
        return False
    if accelerator is None:
        print("setup: no accelerator found, installing the pinned CPU environment (a few minutes)", flush=True)
        install_cpu(target)
    else:
        print(f"setup: {accelerator} found, using the torch and vLLM of this environment", flush=True)
        install_beside_host(target)
    # A leftover egg-info in the root shadows the installed entry points for any Python started there.
    shutil.rmtree(ROOT / "gfdit.egg-info", ignore_errors=True)
    stamp.write_text(wanted)
    return True


def install_cpu(target: Path) -> None:
    if not (target / "bin" / "python").exists():
        _create(target)
    print("setup: torch", flush=True)
    # By itself, its own requirements at the pinned versions; then only exact pins, nothing to resolve.
    _pip(target, "-c", REQUIREMENTS / "cpu.txt", "-r", REQUIREMENTS / "cpu-torch.txt")
    print("setup: vLLM, vLLM-Omni, tools", flush=True)
    lists = [
        argument for name in ("cpu-nodeps", "cpu", "dev") for argument in ("-r", REQUIREMENTS / f"{name}.txt")
    ]
    _pip(target, "--no-deps", *lists)
    _pip(target, "--no-deps", "--no-build-isolation", "-e", ROOT)


def install_beside_host(target: Path) -> None:
    if not (target / "bin" / "python").exists():
        _create(target)
    _show_host_packages(target)
    visible = _output(target, "-c", LIST_DISTRIBUTIONS)
    _check_host(visible.splitlines())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(visible)
        constraints.flush()
        _pip(target, "-c", constraints.name, "-e", f"{ROOT}[dev,demo]")


def _show_host_packages(target: Path) -> None:
    """Let `target` see what this interpreter sees: system, conda or virtual environment, path files included."""
    own = next(target.resolve().glob("lib/python*/site-packages"))
    seen = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({str(path)!r})\n" for path in seen if path.resolve() != own]
    own.joinpath("gfdit_host.pth").write_text("".join(lines))


def _check_host(visible: Sequence[str]) -> None:
    versions = dict(line.split("==", 1) for line in visible)
    missing = [name for name in ("torch", "vllm") if name not in versions]
    if not versions.get("vllm-omni", "").startswith("0.30."):
        missing.append(f"vllm-omni 0.30.* (found: {versions.get('vllm-omni', 'none')})")
    if missing:
        raise SetupError(f"install first, as your GPU needs it: {', '.join(missing)}; then run make setup again")


def _create(target: Path) -> None:
    try:
        venv.create(target, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise SetupError("cannot create a virtual environment: install the package python3-venv") from error


def _pip(target: Path, *args: str | Path) -> None:
    quiet = ("-qq", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    command = [target / "bin" / "python", "-m", "pip", "install", *quiet, *args]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SetupError(f"pip install {' '.join(map(str, args))} failed (see above)")


def _output(target: Path, *args: str) -> str:
    return subprocess.run([target / "bin" / "python", *args], check=True, capture_output=True, text=True).stdout


def _fingerprint(accelerator: str | None) -> str:
    """Everything the environment was made from: when it changes, `make setup` does its work again."""
    digest = hashlib.sha256(f"{accelerator} {ROOT} {sys.version_info[:2]}".encode())
    for path in [*sorted(REQUIREMENTS.glob("*.txt")), ROOT / "pyproject.toml", Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
