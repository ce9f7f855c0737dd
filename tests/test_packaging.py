"""What is installed is all of gfdit, and works without the repository.

`policies/` and `sim/` are gfdit.policies and gfdit.sim: in a wheel, editable, to the type checker.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from gfdit.cli.main import COMMANDS, EXTRAS
from tools.build_dist import build

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"gfdit": "gfdit", "policies": "gfdit/policies", "sim": "gfdit/sim"}
"""Folder in the repository -> folder in an installation."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The archive, and the wheel that was made of it: what the archive lacks is missing in both."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(built: tuple[Path, Path]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(built[1])


def test_wheel_holds_every_file_once(wheel: zipfile.ZipFile) -> None:
    """Tables of costs, what is known of pipelines, the page of a server, and every module."""
    expected = [
        f"{installed}/{path.relative_to(ROOT / folder)}"
        for folder, installed in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not any(p.is_symlink() for p in path.parents)
    ]
    packed = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(packed) == sorted(expected)
    assert {"gfdit/py.typed", "gfdit/omni/ui.html", "gfdit/sim/costs/flux-h100.json"} <= set(packed)


def test_wheel_declares_its_entry_points(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for group in ("vllm.platform_plugins", "vllm_omni.general_plugins", "gfdit.policies", "console_scripts"):
        assert f"[{group}]" in text


def test_extras_are_those_that_commands_name() -> None:
    """What `gfdit COMMAND` tells to install would help."""
    extras = PROJECT["optional-dependencies"]
    assert {"sim", "top", "plots", "omni", "demo"} <= extras.keys()
    distributions = importlib.metadata.packages_distributions()
    for module, extra in EXTRAS.items():
        named = {re.split("[><=~]", one)[0].lower() for one in extras[extra]}
        assert named & {name.lower() for name in distributions[module]}, (module, extra)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `gfdit` of an environment that has the base dependencies and nothing else, not even the repository."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for requirement in PROJECT["dependencies"]:
        for path in importlib.metadata.files(re.split("[><=~]", requirement)[0]) or ():
            top = Path(path.parts[0])
            if top.suffix != ".py" and ".." not in path.parts and not (site / top).exists():
                (site / top).symlink_to(Path(str(path.locate())).parents[len(path.parts) - 2])
    python = folder / "bin" / "python"
    quiet = ("-qq", "--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile")
    _run(sys.executable, "-m", "pip", "--python", python, "install", *quiet, str(wheel.filename), cwd=folder)
    return folder / "bin" / "gfdit"


def test_base_installation_simulates_a_policy(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "02_write_a_policy.py", tmp_path / "mine.py")
    costs = ("--costs", "flux-h100", "--ranks", "4")
    workload = ("poisson", "--load", "0.7", "--num-requests", "20", "--out", "trace.jsonl")
    _run(installed, "workload", *workload, *costs, cwd=tmp_path)
    table = _run(
        installed, "sim", "--trace", "trace.jsonl", *costs, "--policy", "mine.py:OldestWidest", cwd=tmp_path
    )
    assert re.search(r"^all +20 +20 +0 ", table, re.MULTILINE), table


EVERY_COMMAND = """
import sys
from gfdit.cli.main import COMMANDS, main
for line in sys.stdin.read().splitlines():
    assert main(line.split()) == 2, line
for command in COMMANDS.keys() - {"models"}:  # which is about vLLM-Omni
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
"""


def test_base_installation_tells_what_is_missing(installed: Path, tmp_path: Path) -> None:
    lacking = {
        "top --once": "gfdit top: error: needs rich: pip install 'gfdit[top]'",
        "sweep --workload short --load 1 --costs flux-h100 --ranks 4 --policy edf": (
            "gfdit sweep: error: needs tqdm: pip install 'gfdit[sim]'"
        ),
        "serve MODEL --ranks 2": "gfdit serve: error: needs vllm: install vLLM 0.30 as the machine needs it, "
        "then: pip install 'gfdit[omni]'",
    }
    command: list[str | Path] = [installed.with_name("python"), "-c", EVERY_COMMAND]
    done = subprocess.run(command, cwd=tmp_path, input="\n".join(lacking), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == list(lacking.values())
    assert all(f"usage: gfdit {name}" in done.stdout for name in COMMANDS.keys() - {"models"})


@pytest.mark.thorough
def test_the_archive_installs_from_an_index(sdist: Path, tmp_path: Path) -> None:
    """As a user does it, with dependencies fetched: `pip install gfdit[sim]`, then a bound and a picture."""
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    gfdit = tmp_path / "env" / "bin" / "gfdit"
    _run(gfdit.with_name("pip"), "install", "-qq", f"{sdist}[sim,top]", cwd=tmp_path)
    costs = ("--costs", "flux-h100", "--ranks", "4")
    _run(gfdit, "workload", "poisson", "--load", "0.7", "--num-requests", "20", "--out", "t", *costs, cwd=tmp_path)
    done = _run(
        gfdit, "sim", "--trace", "t", *costs, "--policy", "edf", "--bound", "--plot", "t.png", cwd=tmp_path
    )
    assert "no schedule exceeds" in done and (tmp_path / "t.png").exists()
    assert "needs vllm" in subprocess.run([gfdit, "serve", "M"], capture_output=True, text=True).stderr


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
    assert 'Revealed type is "str"' in _run(sys.executable, "-m", "mypy", *cache, "-c", code, cwd=ROOT)


def test_type_checker_would_notice_a_missing_folder(tmp_path: Path) -> None:
    """Negative control for the test above."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "-c", "import gfdit.no_such_package"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "gfdit.no_such_package" in done.stdout
