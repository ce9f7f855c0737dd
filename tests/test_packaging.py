"""`policies/` and `sim/` are gfdit.policies and gfdit.sim: in a wheel, editable, to the type checker."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"gfdit": "gfdit", "policies": "gfdit/policies", "sim": "gfdit/sim"}
"""Folder in the repository -> folder in an installation."""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: building in place leaves an egg-info that shadows the installed entry points."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    _run("pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", out, tree, cwd=out)
    return zipfile.ZipFile(next(out.glob("gfdit-*.whl")))


def test_wheel_holds_every_module_once(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder)}"
        for folder, installed in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    packed = [name for name in wheel.namelist() if name.endswith(".py")]
    assert sorted(packed) == sorted(expected)
    assert {"gfdit/py.typed", "gfdit/adapters/forward/proven.json"} <= set(wheel.namelist())


def test_wheel_declares_its_entry_points(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for group in ("vllm.platform_plugins", "vllm_omni.general_plugins", "gfdit.policies", "console_scripts"):
        assert f"[{group}]" in text


def test_unpacked_wheel_imports(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import gfdit.policies as p, gfdit.sim as s; print(p.__file__, s.__file__, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    expected = [str(tmp_path / "gfdit" / name / "__init__.py") for name in ("policies", "sim")]
    assert done.stdout.split() == expected, done.stderr


def test_editable_install_shows_the_top_level_folders(tmp_path: Path) -> None:
    code = "import gfdit.policies as p, gfdit.sim as s; print(p.__file__, s.__file__, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    found = [Path(line).resolve() for line in done.stdout.split()]
    assert found == [ROOT / name / "__init__.py" for name in ("policies", "sim")], done.stderr


def test_type_checker_sees_the_top_level_folders(tmp_path: Path) -> None:
    code = "import gfdit.policies, gfdit.sim; reveal_type(gfdit.policies.__name__)"
    cache = ("--cache-dir", tmp_path)
    assert 'Revealed type is "str"' in _run("mypy", *cache, "-c", code, cwd=ROOT)


def test_type_checker_would_notice_a_missing_folder(tmp_path: Path) -> None:
    """Negative control for the test above."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "-c", "import gfdit.no_such_package"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "gfdit.no_such_package" in done.stdout
