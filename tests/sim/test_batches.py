"""Several steps as one: their time, and what happens when they do not fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest import approx

from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView, TaskKind
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.sim.simulator import Status
from tests.sim.runs import ends, run
from tests.sim.tables import AROUND_S, DECODE_S, ENCODE_S, PREPARE_S, line, table


@dataclass
class Pairs:
    """Steps of two requests as one, everything else alone; all on rank 0."""

    name = "pairs"

    def schedule(self, view: SchedulerView) -> Decision:
        steps = [task for task in view.ready if task.kind is TaskKind.DENOISE]
        others = [task for task in view.ready if task.kind is not TaskKind.DENOISE]
        wanted = others[:1] or steps[:2]
        layout = ExecutionLayout((0,))
        return Decision((Dispatch(tuple(task.id for task in wanted), layout),) if view.free_ranks else ())


def batched_table(seconds: float = 2.5) -> CostTable:
    pair = CostEntry("m", TaskKind.DENOISE, 512, 512, 1, False, 1, 1, 2, seconds)
    return replace(table(), entries=(*table().entries, pair))


def test_a_batched_step_takes_the_time_of_its_entry_and_its_tasks_share_it() -> None:
    trace = [line("a", num_steps=3), line("b", num_steps=3)]
    done = run(Pairs(), trace, num_ranks=1, costs=batched_table())
    around_s = 2 * (ENCODE_S + PREPARE_S)
    assert ends(done) == {
        "a": approx(around_s + 3 * 2.5 + DECODE_S),
        "b": approx(around_s + 3 * 2.5 + 2 * DECODE_S),
    }
    assert [request.rank_seconds for request in done.requests] == approx([AROUND_S + 3 * 1.25] * 2)
    assert done.num_tasks == 12 and not done.faults


def test_a_batch_that_the_table_has_no_time_for_is_an_error() -> None:
    done = run(Pairs(), [line("a"), line("b")], num_ranks=1)
    assert [request.status for request in done.requests] == [Status.FAILED, Status.COMPLETED]
    assert "no cost for denoise of model 'm' at sp1 batch 2, known: sp1, sp2, sp4" in done.requests[0].detail


def test_tasks_that_do_not_fit_one_batch_are_named_with_the_rule() -> None:
    done = run(Pairs(), [line("a"), line("b", height=1024)], num_ranks=1, costs=batched_table())
    assert {request.status for request in done.requests} == {Status.COMPLETED}
    assert "kind, model, shape and cfg must agree" in done.faults[0]
