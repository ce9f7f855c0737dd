"""Triage with edits under masks: they share steps without a deadline, too, and evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gfdit.observe.timeline import TimelineWriter, read_timeline
from gfdit.policies.triage import Triage
from gfdit.sim.costs.edit_costs import EditCosts
from gfdit.sim.costs.flux_edits import edit_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest

TABLE = edit_table()
EDITS = EditCosts(10, 0.1, 0.0, 1.0, 1.0, 1.0, 9.0, recorded=("t",))
"""An edit of ``t`` computes as much as its mask says."""


def edits(ratios: list[float | None], num_steps: int = 10) -> list[TraceRequest]:
    """All at once, without deadlines; None: not an edit."""
    line = TraceRequest("", 0.0, "flux.1-dev", 1024, 1024, 1, num_steps)
    return [
        replace(line, id=f"r{i:02}", mask_ratio=ratio, template=None if ratio is None else "t")
        for i, ratio in enumerate(ratios)
    ]


def run(
    trace: list[TraceRequest], num_ranks: int, folder: Path, **options: Any
) -> tuple[SimulationRun, Counter[int]]:
    """And how often so many took a step together."""
    path = folder / "timeline.json"
    with TimelineWriter(path, num_ranks, base_s=0.0) as writer:
        settings = SimulationOptions(num_ranks, edits=EDITS, check_every_event=True)
        done = Simulator(Triage(**options), TABLE, trace, settings).run(writer)
    assert {request.status for request in done.requests} == {Status.COMPLETED} and not done.faults
    steps = [span for span in read_timeline(path) if span.kind == "denoise"]
    sizes = Counter(Counter((span.rank, span.start_s) for span in steps).values())
    return done, sizes


def rank_s(done: SimulationRun) -> float:
    return sum(request.rank_seconds for request in done.requests)


def test_they_share_steps_without_deadlines_and_others_do_not(tmp_path: Path) -> None:
    together, sizes = run(edits([0.1, 0.3, 0.2, 0.2]), 1, tmp_path)
    alone, _ = run(edits([0.1, 0.3, 0.2, 0.2]), 1, tmp_path, batching=False)
    assert max(sizes) == 4 and rank_s(together) < 0.9 * rank_s(alone)
    _, sizes = run(edits([None] * 4), 1, tmp_path)
    assert set(sizes) == {1}


def test_ranks_have_even_shares_of_them(tmp_path: Path) -> None:
    """Full batches would take eight of them on one rank, and one on each of the others."""
    done, sizes = run(edits([0.2] * 12), 4, tmp_path)
    assert max(sizes) == 3
    ends_s = [request.end_s or 0.0 for request in done.requests]
    assert max(ends_s) < 1.25 * rank_s(done) / 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_of_a_mixture_end(num_ranks: int, tmp_path: Path) -> None:
    run(edits([0.05, None, 0.9, 1.0, 0.4, None, 0.01]), num_ranks, tmp_path)
