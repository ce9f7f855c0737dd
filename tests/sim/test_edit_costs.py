"""What masks leave of a step, and which templates the host holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfdit.core.cost.file import CostTable, MaskedSteps
from gfdit.policies.fcfs import Fcfs
from gfdit.sim.bounds.fluid import check_bounded
from gfdit.sim.costs.edit_costs import EditCosts, Templates, Tier
from gfdit.sim.costs.flux_edits import batch_s, flux_edits
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import Simulator
from tests.sim.tables import AROUND_S, STEP_S, line, table

RATIOS = st.floats(0.01, 1.0)


def costs(num_held: int = 2, load_s: float = 0.0, **more: object) -> EditCosts:
    """Ten blocks of 0.1 s; all of a block's loads take ``load_s`` from the host, ten times that from disk."""
    return EditCosts(10, 0.1, load_s, 1.0, 0.1, 1.0, float(num_held), **more)  # type: ignore[arg-type]


def test_without_loads_the_mask_says_it_all() -> None:
    assert [costs().percent(ratio, Tier.HOST) for ratio in (0.001, 0.2, 0.201, 1.0)] == [1, 20, 21, 100]
    assert costs().percent(0.2, Tier.ABSENT) == 100
    assert costs(text_share=0.5).percent(0.2, Tier.HOST) == 60


def test_loads_that_nothing_hides_are_replaced_by_full_blocks() -> None:
    """Of ten blocks k compute all: 0.08 s of loads for each other one, or 0.1 k + 0.02 (10 - k) s of computing.

    They meet near k = 4: 0.48 s of loads, 0.52 s of computing, of 1 s.
    """
    assert costs(load_s=0.1).percent(0.2, Tier.HOST) == 52
    assert costs(load_s=0.1).percent(0.2, Tier.DISK) == 92  # 0.8 s for each: one block reads


@given(RATIOS, st.floats(0.0, 1.0), st.sampled_from((Tier.HOST, Tier.DISK)))
def test_nothing_is_faster_than_computing_what_is_painted_or_slower_than_all(
    ratio: float, load_s: float, tier: Tier
) -> None:
    percent = costs(load_s=load_s).percent(ratio, tier)
    assert min(100.0, 100 * ratio - 1e-6) <= percent <= 100


@given(RATIOS, RATIOS)
def test_a_faster_link_and_a_smaller_mask_never_cost_more(one: float, other: float) -> None:
    flux = flux_edits()
    assert flux.percent(one, Tier.HOST) <= flux.percent(one, Tier.DISK)
    small, large = sorted((one, other))
    assert costs().percent(small, Tier.HOST) <= costs().percent(large, Tier.HOST)


def test_the_host_keeps_what_was_used_last() -> None:
    templates = Templates(costs(num_held=2))
    asked = [templates.use(name) for name in ("a", "b", "a", "c", "b", "a")]
    absent, host, disk = Tier.ABSENT, Tier.HOST, Tier.DISK
    assert asked == [absent, absent, host, absent, disk, disk]


def test_of_what_was_recorded_before_the_first_are_in_the_host() -> None:
    templates = Templates(costs(num_held=2, recorded=("a", "b", "c")))
    assert [templates.use(name) for name in ("b", "a", "c", "d")] == [Tier.HOST, Tier.HOST, Tier.DISK, Tier.ABSENT]


def test_a_host_without_room_holds_nothing() -> None:
    templates = Templates(costs(num_held=0))
    assert [templates.use("a"), templates.use("a")] == [Tier.ABSENT, Tier.DISK]


def simulated_ends(costs_of_edits: EditCosts | None) -> list[float | None]:
    trace = [line(str(i), 100.0 * i, mask_ratio=0.2, template="t") for i in range(2)]
    trace.append(line("2", 200.0))
    run = Simulator(Fcfs(), masked_table(), trace, SimulationOptions(1, edits=costs_of_edits)).run()
    return [request.latency_s for request in run.requests]


def masked_table() -> CostTable:
    return replace(table(), masked_steps=(MaskedSteps("m", 0.0, 1.0),))


def test_the_first_edit_of_a_template_computes_all_and_the_next_ones_what_is_painted() -> None:
    full_s = AROUND_S + 2 * STEP_S[1]
    assert simulated_ends(costs()) == pytest.approx([full_s, AROUND_S + 2 * 0.2 * STEP_S[1], full_s])
    assert simulated_ends(None) == pytest.approx([full_s] * 3)


def test_wrong_figures_are_named() -> None:
    with pytest.raises(ValueError, match="host_bytes_per_s must be a positive number, got 0"):
        EditCosts(10, 0.1, 1.0, 0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="text_share must be from 0 to 1, got 2"):
        costs(text_share=2)


def test_there_is_no_bound_with_edits() -> None:
    with pytest.raises(ValueError, match="no upper bound with edits"):
        check_bounded(SimulationOptions(1, edits=costs()))


@pytest.mark.parametrize("gain", [1.0, 1.29])
def test_four_at_once_gain_what_is_said(gain: float) -> None:
    assert 4 * 0.1 / batch_s(0.1, 4, gain) == pytest.approx(gain)
    assert batch_s(0.1, 1, gain) == pytest.approx(0.1)
