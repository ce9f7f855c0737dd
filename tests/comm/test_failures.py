"""What happens when peers are late, dead, confused or told to stop, and how the edges recover."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from gfdit.comm import CommAborted, CommError, CommMismatch, CommTimeout, GroupFreeComm
from tests.comm.worlds import PATIENCE_S, open_world, run_ranks, set_timeout, wait_until

# An abort that is not heard ends a wait only after its timeout.
FAR_FROM_A_TIMEOUT_S = PATIENCE_S / 2


def gather_ranks(comm: GroupFreeComm, ranks: tuple[int, ...], rows: int = 3) -> None:
    """An all-gather whose result is checked."""
    out = torch.full((rows * len(ranks),), -1)
    comm.all_gather_into_tensor(out, torch.full((rows,), comm.rank), comm.group(ranks))
    assert out.view(len(ranks), rows)[:, -1].tolist() == list(ranks)


def expect(error: type[CommError], attempt) -> tuple[CommError, float]:
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        attempt()
    assert type(caught.value) is error, caught.value
    return caught.value, time.monotonic() - begin


def peer_never_arrives(comm: GroupFreeComm) -> list[tuple[CommError, float]]:
    if comm.rank == 1:
        return []
    seen = []
    for _ in range(3):
        seen.append(expect(CommTimeout, lambda: gather_ranks(comm, (0, 1))))
        comm.reset((1,))
    seen.append(expect(CommTimeout, lambda: comm.recv(torch.empty(4), 1)))
    comm.reset((1,))
    comm.send(torch.zeros(4), 1)
    comm.send(torch.zeros(4), 1)
    seen.append(expect(CommTimeout, lambda: comm.send(torch.zeros(4), 1)))  # no credit left
    return seen


def test_a_peer_that_never_arrives_is_a_timeout_naming_the_edge() -> None:
    seen = run_ranks(peer_never_arrives, 2, comm_timeout_s=0.2)[0]
    for error, elapsed_s in seen:
        assert (error.rank, error.edge, error.lane) == (0, (1, 0), "compute")
        assert error.observed == 0 and error.expected != 0
        assert elapsed_s >= 0.2
    text = str(seen[0][0])
    for part in ("rank 0", "timed out", "1->0", "'compute'", "all_gather", "(0, 1)", "expected", "observed"):
        assert part in text, text
    assert "credit" in str(seen[-1][0])


def test_errors_pickle() -> None:
    error = CommMismatch(1, (0, 1), 5, 6, "migration", "barrier", "why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CommMismatch and str(copy) == str(error) and copy.edge == (0, 1)
    assert issubclass(CommMismatch, CommError)


def mismatched(comm: GroupFreeComm) -> list[str]:
    group, reverse = comm.group((0, 1)), comm.group((1, 0))
    pair = [
        (lambda: comm.barrier(group), lambda: gather_ranks(comm, (0, 1))),
        (lambda: comm.barrier(group), lambda: comm.barrier(reverse)),
        (lambda: gather_ranks(comm, (0, 1), 3), lambda: gather_ranks(comm, (0, 1), 4)),
        (lambda: comm.all_reduce(torch.zeros(2), group), lambda: comm.all_reduce(torch.zeros(3), group)),
    ]
    texts = []
    for attempts in pair:
        error, _ = expect(CommMismatch, attempts[comm.rank])
        assert error.edge == (1 - comm.rank, comm.rank)
        # A failed edge refuses work at once, so nothing is ever read from the wrong instance.
        refused, _ = expect(CommAborted, lambda: comm.barrier(group))
        assert "needs a reset" in str(refused)
        comm.lane("migration").barrier(group)  # the other lane is unharmed; it is the host's word here
        comm.reset((0, 1))
        gather_ranks(comm, (0, 1))
        texts.append(str(error))
    return texts


def test_different_collectives_are_a_mismatch_and_recoverable() -> None:
    for texts in run_ranks(mismatched, 2):
        assert all("mismatched" in text for text in texts)


def order_violated(comm: GroupFreeComm) -> None:
    """The same collectives in different orders: seen at once, on both sides, never as wrong data."""
    first, second = ((0, 1, 2), (1, 0)) if comm.rank == 0 else ((1, 0), (0, 1, 2))
    if comm.rank == 2:
        set_timeout(comm, 0.4)  # rank 1 never comes
        expect(CommTimeout, lambda: gather_ranks(comm, (0, 1, 2)))
        return
    expect(CommMismatch, lambda: [gather_ranks(comm, ranks) for ranks in (first, second)])


def test_an_order_violation_is_detected() -> None:
    run_ranks(order_violated, 3)


def aborted(comm: GroupFreeComm) -> float:
    """Rank 2 calls a collective off instead of joining it; all three recover; ranks 3 and 4 never notice."""
    members = (0, 1, 2)
    if comm.rank >= 3:
        for _ in range(200):
            gather_ranks(comm, (3, 4))
        return 0.0
    for _ in range(5):
        if comm.rank == 2:
            time.sleep(0.1)  # the others may wait by now or be yet to come, it is all the same to them
            comm.abort(members)
            error, elapsed_s = expect(CommAborted, lambda: gather_ranks(comm, members))
        else:
            error, elapsed_s = expect(CommAborted, lambda: gather_ranks(comm, members))
            assert error.edge[0] == 2
        comm.lane("migration").barrier(comm.group(members))  # quiesce, by word of the host
        if comm.rank == 0:
            time.sleep(0.02)  # the others may use the new edges before this rank has reset its side
        comm.reset(members)
        for _ in range(3):
            gather_ranks(comm, members)
            if comm.rank != 2:
                gather_ranks(comm, (1, 0))
    return elapsed_s


def test_abort_is_prompt_and_reset_recovers() -> None:
    assert max(run_ranks(aborted, 5)[:2]) < FAR_FROM_A_TIMEOUT_S


def aborted_before_arrival(comm: GroupFreeComm) -> float:
    """Rank 1 finds its edge aborted and never serves rank 0, which waits for rank 1, not for the aborter."""
    members, word = (0, 1, 2), torch.zeros(1)
    if comm.rank == 2:
        time.sleep(0.1)  # rank 0 waits for rank 1 by now, or finds the edge aborted, too
        comm.abort((0, 1))
        comm.lane("migration").send(word, 1)
        return 0.0
    if comm.rank == 1:
        comm.lane("migration").recv(word, 2)
    error, elapsed_s = expect(CommAborted, lambda: gather_ranks(comm, members))
    assert error.edge == (2, comm.rank)
    return elapsed_s


def test_an_abort_reaches_ranks_that_wait_for_another_member() -> None:
    assert max(run_ranks(aborted_before_arrival, 3)) < FAR_FROM_A_TIMEOUT_S


def aborted_by_own_thread(comm: GroupFreeComm) -> list[float]:
    """A control thread stops its own rank's wait, in every kind of wait."""
    if comm.rank == 1:
        return []
    waits = [
        lambda: gather_ranks(comm, (0, 1)),
        lambda: comm.recv(torch.empty(1), 1),
        lambda: [comm.send(torch.zeros(1), 1) for _ in range(3)],
        lambda: comm.broadcast(torch.zeros(1), 1, comm.group((0, 1))),
    ]
    elapsed = []
    for wait in waits:
        timer = threading.Timer(0.05, comm.abort, [(0, 1)])
        timer.start()
        elapsed.append(expect(CommAborted, wait)[1])
        timer.join()
        expect(CommAborted, lambda: comm.barrier(comm.group((0, 1))))
        comm.reset((1,))
    return elapsed


def test_a_control_thread_can_abort_its_own_rank() -> None:
    assert max(run_ranks(aborted_by_own_thread, 2)[0]) < FAR_FROM_A_TIMEOUT_S


def failed_midway(comm: GroupFreeComm) -> None:
    """The ends of an edge have counted differently when the reset comes."""
    group = comm.group((0, 1))
    for num_received in (0, 1, 2):
        if comm.rank == 0:
            expect(CommAborted, lambda: [comm.send(torch.full((2000,), i), 1) for i in range(9)])
        else:
            for i in range(num_received):
                out = torch.empty(2000, dtype=torch.int64)
                comm.recv(out, 0)
                assert out[-1] == i
            comm.abort((0,))
        comm.lane("migration").barrier(group)
        comm.reset((0, 1))
        if comm.rank == num_received % 2:
            time.sleep(0.01)
        gather_ranks(comm, (1, 0), 2000)
        gather_ranks(comm, (0, 1), 2000)


def test_reset_when_the_ends_counted_differently() -> None:
    run_ranks(failed_midway, 2, slot_bytes=4096)


def reset_in_use(comm: GroupFreeComm) -> None:
    if comm.rank == 0:
        thread = threading.Thread(target=comm.recv, args=(torch.empty(1), 1))
        thread.start()
        assert wait_until(comm._transport._busy.locked)
        with pytest.raises(ValueError, match="another thread"):
            comm.reset((1,))
        comm.lane("migration").send(torch.zeros(1), 1)
        thread.join()
    else:
        comm.lane("migration").recv(torch.empty(1), 0)
        comm.send(torch.zeros(1), 0)


def test_reset_inside_an_operation_is_refused() -> None:
    run_ranks(reset_in_use, 2)


def until_killed(comm: GroupFreeComm, ranks: tuple[int, ...]) -> CommError:
    """Collectives without end; rank 3 kills itself in the middle."""
    step = 0
    try:
        while True:
            if step == 20:
                set_timeout(comm, 0.5)  # rank 3 does not come again
            gather_ranks(comm, ranks, 3000)
            step += 1
            if comm.rank == 3 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError as error:
        set_timeout(comm, PATIENCE_S)
        return error


def are_quiet(quiet: str) -> bool:
    return all(os.path.exists(f"{quiet}{rank}") for rank in (0, 2))


def unrelated(comm: GroupFreeComm, quiet: str) -> int:
    """Collectives of a group that shares no rank with the killed one's, until that has failed."""
    flag, rounds = torch.zeros(1), 0
    while not flag.item():
        gather_ranks(comm, (1, 4), 3000)
        flag.fill_(rounds > 10 and are_quiet(quiet))
        comm.broadcast(flag, 1, comm.group((1, 4)))
        rounds += 1
    return rounds


def rejoin(comm: GroupFreeComm, ranks: tuple[int, ...]) -> str:
    comm.reset(ranks, generation=9)
    for _ in range(5):
        gather_ranks(comm, ranks, 3000)
    return "rejoined"


def killed_and_replaced(comm: GroupFreeComm, quiet: str) -> object:
    """``quiet`` + rank is a file that stands for the survivors' word to the host."""
    if comm.rank in (1, 4):
        return unrelated(comm, quiet)
    error = until_killed(comm, (0, 3, 2))
    Path(f"{quiet}{comm.rank}").touch()
    assert wait_until(lambda: are_quiet(quiet))
    comm.reset((0, 2))
    gather_ranks(comm, (2, 0), 3000)
    assert wait_until(lambda: os.path.exists(f"{quiet}-replaced"))
    assert rejoin(comm, (0, 3, 2)) == "rejoined"
    return error


def test_a_killed_rank_is_a_timeout_for_its_peers_only_and_can_be_replaced(tmp_path: Path) -> None:
    quiet = str(tmp_path / "quiet")
    with open_world(5) as world:
        world.start_all(killed_and_replaced, quiet)
        assert world.result(3) is None
        assert wait_until(lambda: are_quiet(quiet))
        world.start(3, rejoin, (0, 3, 2))
        world.begin(3)
        Path(f"{quiet}-replaced").touch()
        errors = [world.result(rank) for rank in (0, 2)]
        assert all(isinstance(error, CommTimeout) for error in errors), errors
        assert {error.edge for error in errors} & {(3, 0), (3, 2)}
        assert world.result(1) == world.result(4) > 10
        assert world.result(3) == "rejoined"


def aborted_late(comm: GroupFreeComm) -> list[str]:
    """What says that a rank was lost may be read when the edge was reset for the one in its place."""
    group, outcomes = comm.group((0, 1)), []
    comm.reset((0, 1), generation=3)
    comm.barrier(group)
    for newest in (2, 3):
        comm.abort((0, 1), newest)
        try:
            comm.barrier(group)
            outcomes.append("met")
        except CommError as error:
            outcomes.append(type(error).__name__)
    return outcomes


def test_an_abort_of_earlier_generations_leaves_the_present_one_alone() -> None:
    assert run_ranks(aborted_late, 2) == [["met", "CommAborted"]] * 2
