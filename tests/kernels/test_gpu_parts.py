"""The parts of the GPU check on virtual ranks of a CPU: what they compare, and that they see what is wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import beside, dit_block, head_exchanges, processes
from benchmarks.gpu.handshake import Handshake
from benchmarks.gpu.job import ROOT, Job, Spec, read_results
from benchmarks.gpu.profiled import five_kernels, ranges, run_metrics, run_sanitizer
from benchmarks.gpu.ranks import TINY_SIZES, Where
from benchmarks.gpu.shapes import QWEN, WAN_480, Model
from gfdit.comm import GroupFreeComm, spawn

SMALL = WAN_480.small()


def on_virtual_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    sizes: dict[str, Any] = dict(TINY_SIZES)
    return spawn(fn, num_ranks, "local", args, **sizes)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_block_has_the_bits_of_its_reference_at_every_degree(degree: int) -> None:
    told = on_virtual_ranks(dit_block._rank, degree, SMALL, degree, False, 1)
    assert all(entry.off_degree_1 < 0.03 for entry in told) and list(told[0].seconds) == ["eager"]


def test_a_block_whose_heads_go_astray_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one rank gets keys for values."""
    scatter = dit_block.Ulysses.scatter

    def astray(self: dit_block.Ulysses, heads: Any) -> Any:
        query, key, value = scatter(self, heads)
        return (query, value, key) if self._comm.rank == 1 else (query, key, value)

    monkeypatch.setattr(dit_block.Ulysses, "scatter", astray)
    with pytest.raises(AssertionError, match="eager: other bits than the reference"):
        on_virtual_ranks(dit_block._rank, 2, SMALL, 2, False, 1)


def test_the_block_is_one_graph_for_each_piece() -> None:
    """``fullgraph`` raises where a piece would break."""
    (told,) = on_virtual_ranks(dit_block._rank, 1, SMALL, 1, True, 1)
    assert list(told.seconds) == ["compiled"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_head_exchanges_by_every_way(num_ranks: int) -> None:
    told = on_virtual_ranks(head_exchanges._rank, num_ranks, QWEN.small(), 1)
    ways = 2 * ["as chosen"] + 2 * ["unfused copies"] + ["device copy"]
    assert [entry.label["way"] for entry in told[0]] == 2 * ways


@pytest.mark.parametrize("name", ["_exchange", "_unfused"])
def test_a_wrong_head_exchange_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    exchange = getattr(head_exchanges, name)

    def wrong(comm: GroupFreeComm, *args: Any) -> Any:
        results = list(exchange(comm, *args))
        results[-1] = results[-1].roll(comm.rank, dims=2)
        return results

    monkeypatch.setattr(head_exchanges, name, wrong)
    with pytest.raises(AssertionError, match="rank 1: wrong bytes, scatter by"):
        on_virtual_ranks(head_exchanges._rank, 2, QWEN.small(), 1)


@pytest.mark.parametrize("ring", [False, True])
def test_transfers_beside_a_product(ring: bool) -> None:
    told = on_virtual_ranks(beside._beside, 2, 0, ring, 1)
    assert told[0].num_transfers == told[1].num_transfers == 2


@pytest.mark.parametrize(("ring", "operation"), [(False, "broadcast"), (True, "all_to_all_single")])
def test_a_transfer_that_brings_nothing_is_seen(
    ring: bool, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(GroupFreeComm, operation, lambda self, *args: None)
    with pytest.raises(AssertionError, match=r"other bytes have come|another block has come"):
        on_virtual_ranks(beside._beside, 2, 0, ring, 1)


def test_ring_attention_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    told = on_virtual_ranks(beside._ring_rank, 4, QWEN.small(), 1)
    assert max(off for off, _ in told) <= beside._CLOSE
    monkeypatch.setattr(beside, "ring_attention", lambda comm, group, query, *_, **__: torch.zeros_like(query))
    told = on_virtual_ranks(beside._ring_rank, 4, QWEN.small(), 1)
    assert min(off for off, _ in told) > 3 * beside._CLOSE


def test_migrations_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import migrations

    told = on_virtual_ranks(migrations.migration_rank, 4, 5000, 1)
    assert [len(times) for times in told[0]] == [1] * len(migrations.MOVES)
    monkeypatch.setattr(migrations, "same_bits", lambda left, right: False)
    with pytest.raises(AssertionError, match="other latents than were sent"):
        on_virtual_ranks(migrations.migration_rank, 4, 5000, 1)


def test_the_program_that_is_profiled() -> None:
    names = on_virtual_ranks(five_kernels, 2, True)[0]
    assert len(names) == 5 and names[0] == "barrier"


def test_counters_are_read_from_what_the_profiler_prints() -> None:
    text = """==PROF== Connected to process 7 (/usr/bin/python3)
range: barrier
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","Mbyte","us"
"0","7","range","1.5","12.3"
"1","7","range","64.0","456"
"""
    found = ranges(text)
    assert [row["dram__bytes_read.sum"] for row in found] == ["1.5 Mbyte", "64.0 Mbyte"]
    assert found[1]["gpu__time_duration.sum"] == "456 us"
    assert ranges("==ERROR== The user does not have permission") == []


def _lonely(comm: GroupFreeComm) -> str:
    from benchmarks.gpu import handshake

    handshake.INTERPRETED_POLLS = 20
    call = Handshake(comm)
    if comm.rank == 0:
        call()
        try:
            call.check()
        except RuntimeError as error:
            return str(error)
    return ""


_KEY = """
import sys
from gfdit.kernels import barrier, compiled, recv, send
if sys.argv[1] == "same":
    compiled.name_kernels()
kernels = [send.send, barrier.barrier] if sys.argv[2] == "behind" else []
print([kernel.cache_key for kernel in (*kernels, recv.recv)][-1])
"""


@pytest.mark.thorough
def test_kernels_have_the_same_names_in_the_cache_of_every_process() -> None:
    """Else what one process compiled another one compiles again."""

    def key(*how: str) -> str:
        command = [sys.executable, "-c", _KEY, *how]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert key("same", "first") == key("same", "behind")
    assert key("other", "first") != key("other", "behind"), "name_kernels is not needed any more: take it away"


def test_a_handshake_without_its_peer_ends() -> None:
    assert Where("interpreted", 2).run(_lonely)[0] == "rank 0: a peer did not come to the handshake"


_SERVER = """#!/bin/sh
if [ "$1" = "-f" ]; then
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
else
    read word; touch "$CUDA_MPS_PIPE_DIRECTORY/$word"
fi
"""


def test_the_server_that_shares_a_device_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_on_path(tmp_path, monkeypatch, "nvidia-cuda-mps-control", _SERVER)
    with processes.mps():
        directory = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert (directory / "control").exists()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and not directory.exists()


def test_a_server_that_cannot_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "#!/bin/sh\necho not permitted >&2; exit 3\n"
    _put_on_path(tmp_path, monkeypatch, "nvidia-cuda-mps-control", script)
    with pytest.raises(RuntimeError, match="ended with 3: not permitted"), processes.mps():
        raise AssertionError("not reached")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


_TOOL = """#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
cat <<'END'
{printed}
END
exit {status}
"""
_COUNTED = """range: barrier
range: scatter of heads
"ID","Process ID","Kernel Name","gpu__time_duration.sum"
"","","","us"
"0","7","range","1.5"
"1","7","range","64.0\""""


def _job(tmp_path: Path) -> Job:
    return Job(Spec(False, "local", 4, 60.0, str(tmp_path / "results.jsonl"), found=("ncu",)))


def test_counters_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_on_path(tmp_path, monkeypatch, "ncu", _TOOL.format(printed=_COUNTED, status=0))
    run_metrics(_job(tmp_path))
    found = read_results(tmp_path / "results.jsonl")
    rows = [entry["row"] for entry in found if "row" in entry]
    assert [(row["kernels"], row["time"]) for row in rows] == [
        ("barrier", "1.5 us"),
        ("scatter of heads", "64.0 us"),
    ]
    assert "--replay-mode app-range" in (tmp_path / "arguments").read_text()


def test_a_profiler_that_may_not_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    _put_on_path(tmp_path, monkeypatch, "ncu", _TOOL.format(printed=printed, status=1))
    run_metrics(_job(tmp_path))
    (check,) = [entry["check"] for entry in read_results(tmp_path / "results.jsonl") if "check" in entry]
    assert not check["passed"] and "ERR_NVGPUCTRPERM" in check["detail"]


@pytest.mark.parametrize(("status", "passed"), [(0, [False, True, True]), (99, [True, False, False])])
def test_a_sanitizer_must_find_what_was_planted_and_nothing_else(
    status: int, passed: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = "========= Invalid __global__ write of size 1 bytes"
    _put_on_path(tmp_path, monkeypatch, "compute-sanitizer", _TOOL.format(printed=printed, status=status))
    run_sanitizer(_job(tmp_path))
    told = [entry["check"] for entry in read_results(tmp_path / "results.jsonl") if "check" in entry]
    assert [check["passed"] for check in told] == passed
    assert all(check["passed"] or "Invalid __global__ write" in check["detail"] for check in told)


def _put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    path = folder / name
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_models_have_what_every_degree_needs() -> None:
    for model in (QWEN, WAN_480, SMALL):
        assert isinstance(model, Model) and model.tokens % 4 == 0 and model.heads % 4 == 0
