"""When a rank that is at one task for long is taken to be stuck."""

from __future__ import annotations

from gfdit.core.control.records import DispatchRecord
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import TaskView
from gfdit.core.tasks import TaskKind
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.time_limits import PATIENCE, TimeLimits
from tests.support.workload import make_request

TASK_TIMEOUT_S, START_TIMEOUT_S, COMM_TIMEOUT_S = 10.0, 100.0, 7.0
STEP = make_request("r")[1].tasks[2]


class Watched:
    """Limits under a clock that is moved by hand, looked at every second."""

    def __init__(self) -> None:
        config = RuntimeConfig(
            run_dir="",
            num_ranks=2,
            model="m",
            policy="fcfs",
            worker="",
            worker_payload_path="",
            task_timeout_s=TASK_TIMEOUT_S,
            start_timeout_s=START_TIMEOUT_S,
            comm_timeout_s=COMM_TIMEOUT_S,
        )
        self.now_s = 0.0
        self.limits = TimeLimits(config, lambda: self.now_s)
        self.num_sent = 0

    def send(self, layout: ExecutionLayout, expected_s: float = 0.1, size: int = 256) -> int:
        self.num_sent += 1
        view = TaskView.of(make_request("r", size=size)[0], STEP)
        record = DispatchRecord(self.num_sent, (STEP,), (view,), layout, set(layout.ranks), ())
        self.limits.emitted(record, expected_s)
        return self.num_sent

    def do(self, layout: ExecutionLayout) -> None:
        number = self.send(layout)
        for rank in layout.ranks:
            self.limits.over(rank, number, done=True)

    def overdue_after(self, seconds: float) -> dict[int, str]:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            found = self.limits.overdue()
        return found


ALONE, BOTH = ExecutionLayout((0,)), ExecutionLayout((0, 1), ParallelSpec(2))


def test_a_rank_that_is_stuck_is_found_and_says_where() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.send(ALONE)
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1) == {0: f"stuck in {STEP.id} for 11 s"}
    watched.limits.forget(0)
    assert watched.overdue_after(1000) == {}


def test_an_idle_rank_is_never_overdue() -> None:
    watched = Watched()
    watched.do(BOTH)
    assert STEP.kind is TaskKind.DENOISE and watched.overdue_after(1000) == {}


def test_work_that_a_rank_does_for_the_first_time_may_take_as_long_as_a_start() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.send(ALONE, size=512)
    assert watched.overdue_after(START_TIMEOUT_S) == {}
    assert watched.overdue_after(1).keys() == {0}


def test_a_process_that_replaces_another_does_everything_for_the_first_time() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.limits.forget(0)
    watched.send(ALONE)
    assert watched.overdue_after(START_TIMEOUT_S) == {}


def test_long_tasks_may_be_long() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.send(ALONE, expected_s=2.0)
    assert watched.overdue_after(2.0 * PATIENCE) == {}
    assert watched.overdue_after(1).keys() == {0}


def test_a_rank_that_waits_for_a_peer_has_the_time_to_fail_by_itself() -> None:
    watched = Watched()
    watched.do(BOTH)
    number = watched.send(BOTH)
    assert watched.overdue_after(TASK_TIMEOUT_S + COMM_TIMEOUT_S) == {}
    watched.limits.over(0, number, done=False)
    assert watched.overdue_after(1).keys() == {1}


def test_time_counts_from_the_last_sign_of_progress() -> None:
    watched = Watched()
    watched.do(ALONE)
    first = watched.send(ALONE)
    watched.send(ALONE)  # queued behind it
    watched.overdue_after(TASK_TIMEOUT_S)
    watched.limits.over(0, first, done=True)
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    watched.limits.got_on(0)
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1).keys() == {0}


def test_a_call_may_take_as_long_as_a_start() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.limits.called(0, 1, "load_lora")
    watched.send(ALONE)  # behind it
    assert watched.overdue_after(START_TIMEOUT_S) == {}
    watched.limits.answered(0, 1)
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1).keys() == {0}


def test_a_call_that_never_ends_is_found() -> None:
    watched = Watched()
    watched.limits.called(0, 1, "load_lora")
    assert watched.overdue_after(START_TIMEOUT_S) == {}
    assert watched.overdue_after(1) == {0: f"stuck in the call of load_lora for {START_TIMEOUT_S + 1:.0f} s"}


def test_a_call_behind_a_stuck_task_does_not_hide_it() -> None:
    """Of the review: an unanswered call switched the check off."""
    watched = Watched()
    watched.do(ALONE)
    watched.send(ALONE)
    watched.limits.called(0, 1, "load_lora")
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1) == {0: f"stuck in {STEP.id} for 11 s"}


def test_who_was_stopped_himself_measures_anew() -> None:
    watched = Watched()
    watched.do(ALONE)
    watched.send(ALONE)
    watched.overdue_after(1)
    watched.now_s += 1000
    assert watched.limits.overdue() == {}
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1).keys() == {0}


def test_a_result_on_its_way_does_not_hide_the_next_task_and_is_not_waited_for_for_ever() -> None:
    watched = Watched()
    watched.do(ALONE)
    first = watched.send(ALONE)
    watched.limits.delivering(0, first)
    assert watched.overdue_after(TASK_TIMEOUT_S) == {}
    assert watched.overdue_after(1) == {0: f"stuck in the result of {STEP.id} for 11 s"}
    watched.limits.over(0, first, done=True)
    assert watched.overdue_after(1000) == {}
    watched.send(ALONE)
    assert watched.overdue_after(TASK_TIMEOUT_S + 1) == {0: f"stuck in {STEP.id} for 11 s"}
