"""``spawn``: results, errors with the rank named, and no process left running."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm, RankFailed, spawn
from tests.comm.worlds import PATIENCE_S, START_METHOD, run_ranks, wait_until

# Longer than any test: what does it is to be killed.
FOR_EVER_S = 3600.0


class OddError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("something odd")


def echo(comm: GroupFreeComm, x: torch.Tensor, word: str) -> tuple[int, int, torch.Tensor, str]:
    assert torch.get_num_threads() == 1
    return comm.rank, comm.world_size, x + comm.rank, word


@pytest.mark.thorough
def test_results_by_rank_with_a_clean_interpreter() -> None:
    results = spawn(echo, 2, args=(torch.ones(2), "hello"), timeout_s=2 * PATIENCE_S)
    assert [(r[0], r[1], r[2].tolist(), r[3]) for r in results] == [
        (0, 2, [1, 1], "hello"),
        (1, 2, [2, 2], "hello"),
    ]


def alone(comm: GroupFreeComm) -> float:
    x = torch.ones(3)
    comm.all_reduce(x, comm.group((0,)))
    comm.lane("migration").barrier(comm.group((0,)))
    comm.reset(())
    return x.sum().item()


def test_a_world_of_one() -> None:
    assert run_ranks(alone, 1) == [3.0]


def fail(comm: GroupFreeComm, kind: str) -> None:
    if comm.rank == 1:
        if kind == "value":
            raise ValueError("this is wrong")
        if kind == "odd":
            raise OddError(1, 2)
        if kind == "exit":
            os._exit(3)
        time.sleep(FOR_EVER_S)
    comm.barrier(comm.group((0, 1)))


def test_an_exception_is_raised_again_with_the_rank_named() -> None:
    """While the other rank waits for it in a collective, which need not end."""
    with pytest.raises(ValueError, match="this is wrong") as caught:
        run_ranks(fail, 2, "value", comm_timeout_s=FOR_EVER_S)
    assert "raised in rank 1 of 2" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_an_exception_that_does_not_travel() -> None:
    with pytest.raises(RankFailed, match="rank 1: raised") as caught:
        run_ranks(fail, 2, "odd")
    assert "something odd" in str(caught.value) and caught.value.rank == 1


def test_a_rank_that_exits() -> None:
    with pytest.raises(RankFailed, match="rank 1: died with exit code 3"):
        run_ranks(fail, 2, "exit")


def test_overall_timeout() -> None:
    with pytest.raises(RankFailed, match="no result in time"):
        run_ranks(fail, 2, "hang", timeout_s=1.0, comm_timeout_s=FOR_EVER_S)
    assert not multiprocessing.active_children()


def test_comm_timeout_is_passed_on() -> None:
    with pytest.raises(CommTimeout, match=r"after 0\.3 s"):
        run_ranks(fail, 2, "hang", comm_timeout_s=0.3)


def report_and_hang(comm: GroupFreeComm, directory: str) -> None:
    Path(directory, str(os.getpid())).touch()
    time.sleep(FOR_EVER_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc and /dev/shm")
def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "from gfdit.comm import spawn\n"
        "from tests.comm.test_spawn import report_and_hang\n"
        f"if __name__ == '__main__': spawn(report_and_hang, 2, args=({str(tmp_path)!r},))"
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root})
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2)
    finally:
        parent.kill()
        parent.wait()
    ranks = [path.name for path in tmp_path.glob("[0-9]*")]
    assert wait_until(lambda: not any(is_running(pid) for pid in ranks))
    leftovers = [name for name in os.listdir("/dev/shm") if name.startswith(f"gfdit-heap-{parent.pid}-")]
    assert not leftovers


def is_running(pid: str) -> bool:
    """False for a zombie, which only waits to be reaped by whoever adopted it."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_unknown_heap() -> None:
    with pytest.raises(ValueError, match="shared_memory"):
        spawn(echo, 2, heap="magic", start_method=START_METHOD)
