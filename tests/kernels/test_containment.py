"""Kernels whose peers are late, confused or told to stop, interpreted: the host's scenarios, word for word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.comm import CommAborted, CommError, CommTimeout, GroupFreeComm
from gfdit.comm.agreement import is_behind
from tests.comm.test_failures import (
    FAR_FROM_A_TIMEOUT_S,
    aborted,
    aborted_before_arrival,
    aborted_by_own_thread,
    expect,
    failed_midway,
    gather_ranks,
    mismatched,
    order_violated,
    peer_never_arrives,
    reset_in_use,
)
from tests.comm.worlds import PATIENCE_S, open_world, set_timeout, wait_until
from tests.kernels.worlds import InterpretedHeap

SLOT_BYTES = 4096
Scenario = Callable[[GroupFreeComm], Any]


def one_after_another(comm: GroupFreeComm, scenarios: tuple[Scenario, ...], directory: str) -> list[Any]:
    """Results of ``scenarios``; after each, all edges of both lanes are reset."""
    results = []
    for number, scenario in enumerate(scenarios):
        set_timeout(comm, PATIENCE_S)
        results.append(scenario(comm))
        meet(Path(directory), str(number), comm.rank, comm.world_size)
        for lane in (comm, comm.lane("migration")):
            lane.reset(range(comm.world_size), generation=100 * (number + 1))
    return results


def meet(directory: Path, name: str, rank: int, num_ranks: int) -> None:
    """Returns when ``num_ranks`` ranks are here: told by files, whatever their collectives do."""
    (directory / f"{name}-{rank}").touch()
    assert wait_until(lambda: len(list(directory.glob(f"{name}-*"))) == num_ranks)


def run_scenarios(world_size: int, directory: Path, *scenarios: Scenario, **sizes: int) -> list[list[Any]]:
    """Results by scenario, then by rank."""
    with open_world(world_size, slot_bytes=SLOT_BYTES, **sizes) as world:
        world.start_all(one_after_another, scenarios, str(directory), heap_class=InterpretedHeap)
        by_rank = world.results()
    assert all(isinstance(results, list) for results in by_rank), by_rank
    return [list(results) for results in zip(*by_rank, strict=True)]


def replayed_token(comm: GroupFreeComm) -> str:
    """Rank 1 forges: it writes the token of an earlier instance again instead of taking part."""
    from gfdit.comm.layout import MAX_CHUNKS, SIGNAL_WORD

    group = comm.group((0, 1))
    for _ in range(4):
        comm.barrier(group)
    if comm.rank == 0:
        comm.lane("migration").barrier(group)  # it is there before this rank looks
        set_timeout(comm, 0.4)
        error, _ = expect(CommTimeout, lambda: comm.barrier(group))
        return str(error)
    heap: Any = comm._heap
    begin = heap.layout.line_offset(0, owner=0, peer=1) + 8 * SIGNAL_WORD
    tokens = heap.segment(0)[begin : begin + 16 * MAX_CHUNKS].view(torch.int64)
    assert tokens[0] != 0
    tokens[0] = int(tokens[0])
    comm.lane("migration").barrier(group)
    return ""


def impatient(comm: GroupFreeComm) -> list[tuple[CommError, float]]:
    set_timeout(comm, 0.4)  # rank 1 does not come
    return peer_never_arrives(comm)


def not_armed(comm: GroupFreeComm) -> str:
    """After its own reset, a rank must not store into low-latency slots that the peer has not cleared yet."""
    if comm.rank == 1:
        return ""
    comm.reset((1,))
    set_timeout(comm, 0.4)  # rank 1 is done
    error, _ = expect(CommTimeout, lambda: comm.send(torch.zeros(4), 1))
    return str(error)


class CutShortError(Exception):
    """What a user's interrupt would be."""


def cut_short(comm: GroupFreeComm) -> list[str]:
    """An exception in the middle of an interpreted launch of several programs; then the edge is reset."""
    from gfdit.comm.choice import Choice
    from gfdit.comm.choice import Path as CommPath
    from gfdit.kernels import send

    transport: Any = comm._transport
    transport.selector.force(lambda situation: Choice(CommPath.PUSH, 1024, 3))
    texts = []
    if comm.rank == 0:
        publish, num_published = send.publish, 0

        def interrupted(*args: Any) -> None:
            nonlocal num_published
            num_published += 1
            if num_published == 3:
                raise CutShortError
            publish(*args)

        send.publish = interrupted
        with pytest.raises(Exception, match="CutShortError"):
            comm.send(torch.zeros(3 * 1024, dtype=torch.uint8), 1)
        send.publish = publish
        texts.append(str(expect(CommAborted, lambda: comm.send(torch.zeros(1), 1))[0]))
    else:
        set_timeout(comm, 1.0)  # rank 0 stops half-way
        error, _ = expect(CommTimeout, lambda: comm.recv(torch.zeros(3 * 1024, dtype=torch.uint8), 0))
        texts.append(str(error))
    comm.lane("migration").barrier(comm.group((0, 1)))  # quiesce, by word of the host
    comm.reset((0, 1))
    set_timeout(comm, PATIENCE_S)
    x = torch.full((5000,), 7 - comm.rank)
    comm.broadcast(x, 0, comm.group((0, 1)))
    assert x.tolist() == [7] * 5000
    transport.selector.force(None)
    gather_ranks(comm, (0, 1), 600)
    return texts


BOTH_PATHS = (mismatched, aborted_by_own_thread, failed_midway, reset_in_use, replayed_token)


def check_both_paths(outcomes: list[list[Any]]) -> None:
    mismatches, own_thread, _, _, replayed = outcomes
    for texts in mismatches:
        assert all("mismatched" in text and "of group" in text for text in texts), texts
    assert max(own_thread[0]) < FAR_FROM_A_TIMEOUT_S
    for part in ("expected token", "instance 5", "instance 3"):
        assert part in replayed[0], replayed[0]


def test_two_ranks_by_slots(tmp_path: Path) -> None:
    never, short, *others = run_scenarios(2, tmp_path, impatient, cut_short, *BOTH_PATHS)
    errors: list[tuple[CommError, float]] = never[0]
    for error, elapsed_s in errors:
        assert (error.rank, error.edge, error.lane) == (0, (1, 0), "compute")
        assert is_behind(error.observed, error.expected) and elapsed_s >= 0.4
    for part in (
        "rank 0: timed out in all_gather on lane 'compute', edge 1->0",
        "expected token",
        "(0, 1), after",
    ):
        assert part in str(errors[0][0]), errors[0][0]
    assert "waiting for credit" in str(errors[-1][0])
    assert "needs a reset since InterpreterError" in short[0][0] and "timed out in send" in short[1][0], short
    check_both_paths(others)


def test_two_ranks_by_low_latency_slots(tmp_path: Path) -> None:
    unarmed, *others = run_scenarios(2, tmp_path, not_armed, *BOTH_PATHS, low_latency_bytes=1024)
    assert "timed out in send" in unarmed[0] and "waiting for the peer's reset" in unarmed[0], unarmed
    check_both_paths(others)


@pytest.mark.parametrize("low_latency_bytes", [0, 1024])
def test_three_ranks(low_latency_bytes: int, tmp_path: Path) -> None:
    scenarios = order_violated, aborted, aborted_before_arrival
    _, called_off, before_arrival = run_scenarios(3, tmp_path, *scenarios, low_latency_bytes=low_latency_bytes)
    assert max(*called_off[:2], *before_arrival) < FAR_FROM_A_TIMEOUT_S
