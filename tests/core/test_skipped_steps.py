"""What a policy expects of a model whose step cache skips some steps: their average, not the commonest of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gfdit.core import ExecutionLayout, ParallelSpec, RequestView, Shape, TaskKind, TaskView
from gfdit.core.cost.calibration import MEAN_WINDOW
from gfdit.core.cost.table import CostEntry, CostTable, NominalCostModel, TableCostModel

FULL_S, SKIPPED_S = 1.0, 0.1
STEPS = 30
SINGLE = ExecutionLayout((0,), ParallelSpec(1))


def table() -> CostTable:
    """Steps as they take without a cache."""
    entries = [CostEntry("m", kind, 512, 512, 1, False, 1, 1, 1, FULL_S) for kind in TaskKind]
    return CostTable("test", "test", 0.0, 1e9, tuple(entries))


def task(step: int) -> TaskView:
    return TaskView("r/x", "r", "m", TaskKind.DENOISE, step, Shape(512, 512), False, (ParallelSpec(1),), ())


def request(steps_done: int) -> RequestView:
    left = {TaskKind.DENOISE: STEPS - steps_done}
    shape, candidates = Shape(512, 512), (ParallelSpec(1),)
    return RequestView(
        "r", "m", shape, False, steps_done, STEPS, 0.0, None, 0, "default", candidates, left, None, False
    )


def steps_of_a_request(num_skipped_between: int, rng: random.Random) -> list[float]:
    """The first steps in full; then so many skipped after every full one. A little noise."""
    period = num_skipped_between + 1
    full = [step < 4 or step % period == 0 for step in range(STEPS)]
    return [(FULL_S if one else SKIPPED_S) * rng.uniform(0.95, 1.05) for one in full]


def observe(cost: NominalCostModel | TableCostModel, seconds: Sequence[float]) -> None:
    for step, one in enumerate(seconds):
        cost.observe(task(step), SINGLE, one)


@pytest.mark.parametrize("num_skipped_between", [1, 2, 3])
def test_what_is_left_is_what_steps_take_on_average(num_skipped_between: int) -> None:
    rng = random.Random(num_skipped_between)
    requests = [steps_of_a_request(num_skipped_between, rng) for _ in range(4)]
    true_s = sum(map(sum, requests)) / len(requests)
    for cost in (TableCostModel(table(), skips_steps=True), NominalCostModel(skips_steps=True)):
        for seconds in requests:
            observe(cost, seconds)
        assert cost.remaining_s(request(0), SINGLE) == pytest.approx(true_s, rel=0.05)
        assert cost.remaining_s(request(20), SINGLE) == pytest.approx(true_s / 3, rel=0.05)


def test_a_median_would_be_wrong() -> None:
    """Why a mean is taken: the negative control of the test above."""
    cost = TableCostModel(table())
    seconds = steps_of_a_request(2, random.Random(0))
    for _ in range(4):
        observe(cost, seconds)
    assert cost.remaining_s(request(0), SINGLE) < 0.5 * sum(seconds)


def test_a_pause_moves_it_little() -> None:
    cost = TableCostModel(table(), skips_steps=True)
    seconds = steps_of_a_request(2, random.Random(0))
    for _ in range(3):
        observe(cost, seconds)
    before_s = cost.remaining_s(request(0), SINGLE)
    observe(cost, [1000.0])
    assert cost.remaining_s(request(0), SINGLE) == pytest.approx(before_s, rel=0.1)


def test_steps_that_skip_no_more_are_learned_within_the_window() -> None:
    cost = TableCostModel(table(), skips_steps=True)
    for _ in range(3):
        observe(cost, steps_of_a_request(2, random.Random(0)))
    observe(cost, [FULL_S] * MEAN_WINDOW)
    assert cost.remaining_s(request(0), SINGLE) == pytest.approx(STEPS * FULL_S)
