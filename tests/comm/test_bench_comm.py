"""`gfdit bench comm`: figures, the table it writes and reads, and one clear line for every mistake."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from gfdit.cli.main import main
from gfdit.comm.choice import Choice
from gfdit.comm.choice import Path as DataPath
from gfdit.comm.heap import Operation
from gfdit.comm.host_share import BLOCKS, host_calls, without_kernels
from gfdit.comm.selector_table import SelectorTable
from gfdit.kernels.compiled import Variant, kernel_name
from gfdit.kernels.launch import Enqueue, launcher


@pytest.mark.thorough
def test_virtual_ranks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--heap", "local", "--ranks", "3", "--groups", "2", "3", "--sizes", "1K", "100", "--rounds", "2"]
    assert main(["bench", "comm", *argv]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("3 CPU ranks on ")
    # Barrier without sizes, five operations with two groups and two sizes, send between two.
    assert len(lines) == 2 + 5 * 2 * 2 + 2
    assert all(" us (" in line for line in lines)
    assert [line.split()[0] for line in lines[:3]] == ["barrier", "barrier", "all_gather"]


@pytest.mark.thorough
def test_a_table_is_measured_and_then_chosen_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With interpreted kernels, whose times mean nothing: that they decide is what counts."""
    path = tmp_path / "table.json"
    argv = ["--heap", "interpreted", "--sizes", "64", "--operations", "all_to_all", "--rounds", "1"]
    assert main(["bench", "comm", *argv, "--save", str(path)]) == 0
    assert "these figures say nothing about a GPU" in capsys.readouterr().out
    table = SelectorTable.load(path)
    assert {entry.operation for entry in table.entries} == {Operation.ALL_TO_ALL}
    assert {DataPath.PUSH, DataPath.LOW_LATENCY} < {entry.choice.path for entry in table.entries}
    fastest = min(table.entries, key=lambda entry: entry.seconds)
    assert main(["bench", "comm", *argv, "--table", str(path)]) == 0
    line, _, explanation = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith(str(fastest.choice))
    assert (
        f"{fastest.choice}, {fastest.seconds * 1e6:.1f} us by the table of the Triton interpreter" in explanation
    )


@pytest.mark.thorough
def test_every_way_of_heads_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    argv = ["--heap", "interpreted", "--sizes", "3K", "--operations", "scatter_heads", "gather_heads"]
    assert main(["bench", "comm", *argv, "--rounds", "1", "--save", str(path)]) == 0
    ways = {(entry.operation, entry.choice.path) for entry in SelectorTable.load(path).entries}
    paths = (DataPath.PUSH, DataPath.DIRECT_PUSH, DataPath.COPY_ENGINE)
    assert ways == {(op, way) for op in (Operation.SCATTER_HEADS, Operation.GATHER_HEADS) for way in paths}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--save", "table.json"], "only kernels have a choice: --heap torch_symmetric, or --heap local"),
        (["--heap", "magic"], "choose from "),
        (["--sizes", "4X"], "not a number of bytes: '4X' (for example 4096, 64K or 1M)"),
        (["--operations", "gossip"], "unknown operation 'gossip'; known: barrier, all_gather, "),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--groups", "3"], "--groups must be between 2 and --ranks 2, got 3"),
        (["--heap", "interpreted", "--table", "no-such-file"], "no-such-file"),
    ],
)
def test_mistakes_are_one_clear_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gfdit bench: error: ") and message in error and error.count("\n") == 1


@pytest.mark.thorough
def test_what_a_collective_costs_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", "--host", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "kernels replaced by nothing" in head
    assert len(lines) == 9 and all(" us of the host (" in line for line in lines)


def test_a_planned_collective_takes_few_calls_of_python() -> None:
    """However fast the machine is."""
    with without_kernels() as comm:
        for name, call in host_calls(comm).items():
            call()
            # Beside text the outputs are made and cut by the caller.
            limit = 60 * 2 * BLOCKS if "blocks" in name else 70 if "text" in name else 60
            assert num_calls(call) <= limit, name


def num_calls(call: Callable[[], object]) -> int:
    """Functions that are called, of Python and of C."""
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        call()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


def test_a_small_message_is_one_launch() -> None:
    """Up to 64 KiB for each pair; and so is an exchange of heads of any size that fits into a place."""
    launched: list[str] = []

    def met(variant: Variant) -> Enqueue:
        return lambda num_programs, arguments: launched.append(kernel_name(variant.kernel))

    with without_kernels() as comm, patch.object(launcher, "_meet", met):
        group, heads = comm.group(range(4)), [torch.empty(1, 1024, 24, 128, dtype=torch.bfloat16)] * 3
        x, out = torch.empty(1 << 14), torch.empty(4 << 14)
        calls: dict[str, Callable[[], object]] = {
            "barrier": lambda: comm.barrier(group),
            "all_gather": lambda: comm.all_gather_into_tensor(out, x, group),
            "all_to_all": lambda: comm.all_to_all_single(out, out.clone(), group),
            "all_reduce": lambda: comm.all_reduce(x, group),
            "broadcast": lambda: comm.broadcast(x, 0, group),
            "send": lambda: comm.send(x, 1),
            "scatter_heads": lambda: comm.scatter_heads(heads, group),
            "gather_heads": lambda: comm.gather_heads(heads[0], group),
        }
        for name, call in calls.items():
            launched.clear()
            call()
            assert len(launched) == 1, (name, launched)
        launched.clear()
        assert comm.selector is not None
        with comm.selector.forced(Choice(DataPath.PUSH, 1 << 16, num_programs=8)):
            comm.recv(torch.empty(1 << 20), 1)
        assert launched == ["gate", "recv"]  # a large one may wait long, by one warp
