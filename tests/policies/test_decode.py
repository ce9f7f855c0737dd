"""How policies choose the ranks of a decode that can be shared, where the cost table has times for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gfdit.core import ExecutionLayout, ParallelSpec, Policy, TaskKind
from gfdit.core.control.records import RequestRecord
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.static import Static
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.trace import TraceRequest
from tests.sim.runs import ends, run
from tests.sim.tables import STEP_S, line, table

ALONE = table(decode_s={1: 4.0})
# Sp3 is no faster than sp2: there would be as many tiles on its fullest rank.
SHARED = table(decode_s={1: 4.0, 2: 2.0, 3: 2.0, 4: 1.0})
RANKS = 4


def saved_s(policy: Policy, trace: list[TraceRequest], **options: float) -> float:
    """By how much sharing its decode brings forward the end of the first request."""
    alone, shared = (run(policy, trace, RANKS, costs, **options) for costs in (ALONE, SHARED))
    first = trace[0].id
    return (ends(alone)[first] or 0.0) - (ends(shared)[first] or 0.0)


@pytest.mark.parametrize(
    "policy",
    [Static(), Equipartition(), TetriServe(), Triage(), Rssp(0.4), Fcfs(RANKS), Srtf("widest")],
    ids=lambda policy: policy.name,
)
def test_a_request_alone_decodes_on_all_ranks(policy: Policy) -> None:
    assert saved_s(policy, [line("a")]) == pytest.approx(3.0)


@pytest.mark.parametrize("deadline_s", [None, 100.0])
def test_edf_decodes_alone_where_there_is_time(deadline_s: float | None) -> None:
    assert saved_s(Edf(), [line("a", deadline_s=deadline_s)]) == pytest.approx(0.0)


def test_edf_decodes_as_wide_as_the_deadline_asks_for() -> None:
    trace = [line("a", deadline_s=5.0)]
    assert (ends(run(Edf(), trace, RANKS, ALONE))["a"] or 0.0) > 5.0
    assert (ends(run(Edf(), trace, RANKS, SHARED))["a"] or 0.0) == pytest.approx(4.75)  # on two ranks


@pytest.mark.parametrize(
    "policy", [Equipartition(), TetriServe(starts_in_round=True), Triage()], ids=lambda policy: policy.name
)
def test_as_many_requests_as_ranks_decode_alone(policy: Policy) -> None:
    """They are ready to decode at the same time, and nobody takes what another could use."""
    trace = [line(name) for name in "abcd"]
    assert saved_s(policy, trace) == pytest.approx(0.0)


def test_triage_does_not_take_ranks_from_who_waits() -> None:
    """More requests than ranks: a decode that is shared would keep them from their steps."""
    busy = [line("a"), *(line(f"later{index}", 0.1, num_steps=8) for index in range(6))]
    assert saved_s(Triage(), busy) == pytest.approx(0.0)


def replace_decode(costs: CostTable, decode_s: dict[int, float]) -> CostTable:
    entries = [
        replace(entry, seconds=decode_s.get(entry.sp, entry.seconds)) if entry.task is TaskKind.DECODE else entry
        for entry in costs.entries
    ]
    return replace(costs, entries=tuple(entries))


def test_what_is_left_of_a_request_counts_its_decode_as_wide_as_its_steps() -> None:
    done = run(Static(), [line("a")], RANKS, SHARED)
    wide = run(Static(), [line("a")], RANKS, replace_decode(SHARED, {4: 0.5}))
    assert (ends(done)["a"] or 0.0) - (ends(wide)["a"] or 0.0) == pytest.approx(0.5)
    cost = TableCostModel(SHARED)
    graphs = GraphBuilder(cost, RANKS)
    view = RequestRecord(line("a").request(), graphs.build(line("a").request()), 0).view()
    assert view.decode_candidates == tuple(ParallelSpec(sp) for sp in (1, 2, 3, 4))
    around_s = 0.5 + 0.25
    for sp, decode_s in ((1, 4.0), (2, 2.0), (4, 1.0)):
        layout = ExecutionLayout(tuple(range(sp)), ParallelSpec(sp))
        assert cost.remaining_s(view, layout) == pytest.approx(around_s + 2 * STEP_S[sp] + decode_s)


def test_the_simulator_offers_what_a_server_would_have_measured() -> None:
    """512x512 was measured on four ranks; a smaller image may have fewer tiles, a larger one has as many."""
    graphs = GraphBuilder(TableCostModel(SHARED), num_ranks=3)

    def offered(side: int) -> list[int]:
        request = line("a", height=side, width=side).request()
        (decode,) = (task for task in graphs.build(request).tasks if task.kind is TaskKind.DECODE)
        return [spec.sp for spec in decode.candidates]

    assert offered(256) == [1]
    assert offered(512) == offered(1024) == [1, 2, 3]
