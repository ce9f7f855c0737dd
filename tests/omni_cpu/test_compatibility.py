"""What gfdit builds on in vLLM-Omni is all looked for at start, and what is not there is named.

A release is looked at by its source alone: here copies of the installed one, with changes such as releases make.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shutil
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gfdit.cli.main import USAGE_ERROR, main
from gfdit.omni.compatibility import check_process, check_symbols, faults_of, installed_sources
from gfdit.omni.plugin import find_accelerator
from gfdit.omni.vllm_symbols import MEMBERS, SYMBOLS, VERSION
from tests.support import vllm_uses

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")

_ENGINE = "vllm_omni.diffusion.diffusion_engine"
_SHARDING = "vllm_omni.diffusion.distributed.sp_sharding"
_WAN = "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2"


def test_everything_that_the_code_uses_is_looked_for() -> None:
    assert vllm_uses.symbols() == SYMBOLS
    assert vllm_uses.members() == MEMBERS
    assert importlib.metadata.version("vllm-omni") == VERSION


def _refusal(told: Connection) -> None:
    try:
        check_process()
    except ValueError as error:
        told.send(str(error))
    told.close()


def refusal_in(process_name: str) -> str:
    """Of a process that is started as vLLM-Omni starts its replicas."""
    starting = multiprocessing.get_context("spawn")
    ours, theirs = starting.Pipe()
    process = starting.Process(target=_refusal, args=(theirs,), name=process_name)
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        return str(ours.recv())
    process.join()
    return ""


def test_a_replica_of_several_behind_one_server_is_refused() -> None:
    source = importlib.util.find_spec("vllm_omni.diffusion.stage_diffusion_proc")
    assert source is not None and source.origin is not None
    names = [
        keyword.value.value
        for call in ast.walk(ast.parse(Path(source.origin).read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "Process"
        for keyword in call.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    ]
    assert len(names) == 2 and len({*names}) == 1, names  # beside the server, and headless
    assert "run `gfdit serve` on every node" in refusal_in(str(names[0]))
    assert refusal_in("SpawnProcess-1") == ""


def test_this_vllm_omni_has_it_all() -> None:
    check_symbols()


@pytest.mark.parametrize(
    "missing",
    [
        "vllm_omni.diffusion.distributed.parallel_state._CFG",
        "vllm_omni.diffusion.hooks.HookRegistry.get_or_create",
        f"{_WAN}.resolve_wan_flow_shift",
    ],
)
def test_a_name_that_is_not_there_is_said(missing: str) -> None:
    *modules, name = missing.split(".")
    where, of = ".".join(modules), ""
    if where not in SYMBOLS:
        where, _, of = where.rpartition(".")
    wrong = f"{of}.{name}_x".lstrip(".")
    assert f"{of}.{name}".lstrip(".") in SYMBOLS[where]
    with pytest.raises(ImportError, match=f"gfdit needs {where}.{wrong}, which this vLLM-Omni"):
        check_symbols({where: {wrong: None}}, {})


@pytest.mark.parametrize(
    ("parameters", "is_called"),
    [
        ("tensor, dim, validate", True),  # it has another one, which is optional
        ("tensor, dim, group", False),
        ("dim=", False),  # it needs one that gfdit does not give
    ],
)
def test_what_a_function_takes_is_looked_at(parameters: str, is_called: bool) -> None:
    """Of one that is called: others may be added that have a default."""
    symbols = {_SHARDING: {"sp_gather": parameters}}
    found = faults_of(installed_sources(), symbols, {})
    assert bool(found) is not is_called, found
    if not is_called:
        with pytest.raises(ImportError, match=r"gfdit calls .*sp_gather\(.*\), which takes \(tensor, dim"):
            check_symbols(symbols, {})


def test_a_removed_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = importlib.import_module("vllm_omni.diffusion.distributed.parallel_state")
    monkeypatch.delattr(state, "_CFG")
    with pytest.raises(ImportError, match=r"parallel_state\._CFG"):
        check_symbols()


@pytest.mark.parametrize(
    ("place", "name", "parameters", "message"),
    [
        (
            f"{_ENGINE}:DiffusionEngine",
            "_renamed_loop",
            "self",
            r"builds on .*DiffusionEngine\._renamed_loop, which",
        ),
        (f"{_ENGINE}:DiffusionEngine", "_renamed", None, r"builds on .*DiffusionEngine\._renamed, which"),
        (f"{_ENGINE}:Renamed", "_busy_loop", "self", r"builds on .*Renamed\._busy_loop, which"),
        (
            f"{_ENGINE}:DiffusionEngine",
            "_busy_loop",
            "self, timeout",
            r"overrides .*DiffusionEngine\._busy_loop\(self, timeout\), which takes \(self\) in this",
        ),
        (
            f"{_WAN}:Wan22Pipeline",
            "__init__",
            "self",
            r"which takes \(self, \*, od_config, prefix=\) in this",
        ),
    ],
)
def test_a_member_that_is_another_one_is_said(place: str, name: str, parameters: str | None, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        check_symbols({}, {place: {name: parameters}})


# By their source


def test_the_installed_one_has_it_all_by_its_source_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compatibility"]) == 0
    assert f"0 of {sum(map(len, [*SYMBOLS.values(), *MEMBERS.values()]))} things" in capsys.readouterr().out


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with the installed vLLM-Omni's source, as if it were unpacked."""
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None and spec.origin is not None

    def others(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not name.endswith(".py") and (name == "__pycache__" or "." in name)]

    installed = Path(spec.origin).parent
    shutil.copytree(installed, tmp_path / "vllm_omni", copy_function=os.symlink, ignore=others)
    (tmp_path / "PKG-INFO").write_text("Name: vllm-omni\nVersion: 0.99\n")
    return tmp_path


def _edit(release: Path, module: str, *changes: tuple[str, str]) -> None:
    path = release / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    path.unlink()
    path.write_text(text)


def _renamed(release: Path) -> None:
    _edit(release, _ENGINE, ("def _busy_loop(", "def _serve_loop("))


def _changed(release: Path) -> None:
    _edit(release, _ENGINE, ("def abort(self, request_id", "def abort(self, reason, request_id"))


def _called_otherwise(release: Path) -> None:
    _edit(release, _SHARDING, ("def sp_gather(\n", "def sp_gather(\n    stream,\n"))


def _moved_away(release: Path) -> None:
    (release / f"{_SHARDING.replace('.', '/')}.py").unlink()


def _model_changed(release: Path) -> None:
    _edit(release, _WAN, ("def resolve_wan_flow_shift(", "def wan_flow_shift("))


CHANGES: dict[Callable[[Path], None], str] = {
    _renamed: f"gfdit builds on {_ENGINE}.DiffusionEngine._busy_loop, which it does not have",
    _changed: f"gfdit overrides {_ENGINE}.DiffusionEngine.abort(self, request_id)",
    _called_otherwise: f"gfdit calls {_SHARDING}.sp_gather(",
    _moved_away: f"gfdit needs {_SHARDING}, which it does not have",
    _model_changed: f"gfdit needs {_WAN}.resolve_wan_flow_shift, which it does not have",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_a_release_is_one_line(
    change: Callable[[Path], None], release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(release)
    assert main(["compatibility", "--against", str(release)]) == 1
    *faults, last = capsys.readouterr().out.splitlines()
    assert len(faults) == 1 and CHANGES[change] in faults[0], faults
    assert last.startswith("1 of ") and f"vllm_omni 0.99 ({release})" in last


def test_a_release_without_changes_has_it_all(release: Path) -> None:
    assert main(["compatibility", "--against", str(release)]) == 0


def test_a_wheel_is_read_as_it_is(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _renamed(release)
    wheel = tmp_path / "vllm_omni-0.99-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (release / "vllm_omni").rglob("*.py"):
            archive.write(path, path.relative_to(release))
        archive.writestr("vllm_omni-0.99.dist-info/METADATA", "Version: 0.99\n")
    assert main(["compatibility", "--against", str(wheel)]) == 1
    out = capsys.readouterr().out
    assert "_busy_loop, which it does not have" in out and f"vllm_omni 0.99 ({wheel})" in out


def test_a_path_without_it_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vllm_omni.tar.gz").touch()
    for path, told in ((tmp_path, "neither a wheel nor a folder"), (tmp_path / "vllm_omni.tar.gz", "no wheel")):
        assert main(["compatibility", "--against", str(path)]) == USAGE_ERROR
        assert told in capsys.readouterr().err


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compatibility", "--list"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"vLLM-Omni {VERSION}"
    assert f"overrides  {_ENGINE}.DiffusionEngine._busy_loop(self)" in lines
