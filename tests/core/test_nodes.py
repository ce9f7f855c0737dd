"""Ranks in nodes: what crossing them costs, which layouts are offered, and that policies stay on one."""

from __future__ import annotations

from dataclasses import replace as replaced

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import ExecutionLayout, ParallelSpec, RankView, Request, Shape, TaskGraph, TaskKind, TaskView
from gfdit.core.cost.file import StepExchanges
from gfdit.core.cost.nodes import GIGABIT, Nodes
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.ranks import FreeRanks
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.graphs import GraphBuilder

TABLE = load_cost_table("wan2.2-gb200")
SHAPE = Shape(720, 1280, 80)
EXCHANGES = StepExchanges("m", 100, 1000.0)


REQUEST = Request("r", "wan2.2-a14b", SHAPE, 4, 0.0, cfg=True)


def step(cost: TableCostModel, ranks: int = 128) -> TaskView:
    graph: TaskGraph = GraphBuilder(cost, ranks).build(REQUEST)
    return next(TaskView.of(REQUEST, task) for task in graph.tasks if task.kind is TaskKind.DENOISE)


def layout(*ranks: int, sp: int, cfg: int = 1) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(sp, cfg))


def more_s(nodes: Nodes, where: ExecutionLayout, **changes: float) -> float:
    numbers = {"branches": 1, "made_bytes": 1e6, "table_bytes_per_s": 1e11} | changes
    return nodes.more_s(nodes.crossing(where), where.parallel, Shape(512, 512), EXCHANGES, **numbers)  # type: ignore[arg-type]


def test_half_of_what_is_exchanged_goes_between_two_nodes() -> None:
    nodes = Nodes(2, between_bytes_per_s=1e10, between_latency_s=1e-5)
    each = 1000 * 1024 / 4 / 4  # bytes from one of four ranks to another
    expected_s = 100 * (1e-5 + 2 * each / 1e10 - 2 * each / 1e11)
    assert more_s(nodes, layout(0, 1, 2, 3, sp=4)) == pytest.approx(expected_s)
    assert more_s(nodes, layout(0, 1, 2, 3, sp=4), branches=2) - 100e-5 == pytest.approx(2 * (expected_s - 100e-5))
    assert more_s(nodes, layout(0, 1, sp=2)) == 0
    assert more_s(replaced(nodes, within_bytes_per_s=1e10), layout(0, 1, sp=2)) > 0  # slower than the table's


def test_branches_of_guidance_meet_once_a_step() -> None:
    nodes = Nodes(2, between_bytes_per_s=1e10, between_latency_s=1e-5)
    apart, mixed = layout(0, 1, 2, 3, sp=2, cfg=2), layout(0, 2, 1, 3, sp=2, cfg=2)
    assert more_s(nodes, apart) == pytest.approx(1e-5 + 1e6 / 1e10)
    assert more_s(nodes, mixed) > more_s(nodes, apart) + 100e-5


@given(st.permutations(range(8)), st.sampled_from([(8, 1), (4, 2), (4, 1), (2, 2)]), st.integers(1, 8))
def test_crossing_nodes_never_gains_and_a_slower_link_never_helps(
    ranks: list[int], degrees: tuple[int, int], ranks_per_node: int
) -> None:
    where = layout(*ranks[: degrees[0] * degrees[1]], sp=degrees[0], cfg=degrees[1])
    fast, slow = (more_s(Nodes(ranks_per_node, rate), where) for rate in (4e10, 1e9))
    crosses = len({rank // ranks_per_node for rank in where.ranks}) > 1
    assert (0 < fast < slow) if crosses else fast == slow == 0


def test_steps_and_copies_are_priced_by_node() -> None:
    plain, priced = TableCostModel(TABLE), TableCostModel(TABLE, nodes=Nodes(4))
    task, step_s = step(plain), 2.39725
    here, across = layout(0, 1, 2, 3, sp=2, cfg=2), layout(3, 4, 5, 6, sp=2, cfg=2)
    assert plain.task_s(task, here) == plain.task_s(task, across) == priced.task_s(task, here) == step_s
    slower_s = priced.task_s(task, across)
    assert 1.05 * step_s < slower_s < 1.5 * step_s
    for _ in range(20):  # what was measured across nodes is not taken for the step's own time
        priced.observe(task, across, slower_s)
    assert priced.task_s(task, here) == pytest.approx(step_s)
    held = replace(task, artifacts=(("r/latents/0", frozenset({0})),))
    assert plain.migration_s(held, across) < 2 * plain.migration_s(held, here)
    assert priced.migration_s(held, across) > 2 * priced.migration_s(held, here) > 0


def test_a_branch_fits_a_node_or_the_table_has_times_across_nodes() -> None:
    def sizes(table: object, nodes: Nodes | None) -> list[int]:
        return [spec.size for spec in step(TableCostModel(table, nodes=nodes)).candidates]  # type: ignore[arg-type]

    assert sizes(TABLE, None) == [1, 2, 4, 8, 16, 24, 32, 64, 72]
    assert sizes(TABLE, Nodes(72)) == sizes(TABLE, None)
    assert sizes(TABLE, Nodes(8)) == [1, 2, 4, 8, 16]
    assert sizes(TABLE, Nodes(4)) == [1, 2, 4, 8]
    assert sizes(replaced(TABLE, ranks_per_node=24), Nodes(8)) == [1, 2, 4, 8, 16, 32, 64, 72]


def test_links_by_option() -> None:
    assert Nodes.of_links(8) == Nodes(8)
    assert Nodes.of_links(8, "400").between_bytes_per_s == 400 * GIGABIT
    assert Nodes.of_links(8, "2880,400").within_bytes_per_s == 2880 * GIGABIT
    for wrong in ("a", "1,2,3", ""):
        with pytest.raises(ValueError, match=r"links must be \[WITHIN,\]BETWEEN in gigabits a second"):
            Nodes.of_links(8, wrong)
    with pytest.raises(ValueError, match="ranks of a node must be at least 1, got 0"):
        Nodes(0)


def free(*ranks: int, per_node: int = 4) -> FreeRanks:
    return FreeRanks([RankView(rank, None, None, frozenset({"m"}), rank // per_node) for rank in ranks])


def test_a_layout_moves_to_the_node_that_has_room_for_all_of_it() -> None:
    assert free(2, 3, 4, 5, 6, 7).take(ParallelSpec(4), "m", layout(2, 3, sp=2)) == layout(4, 5, 6, 7, sp=4)
    assert free(0, 2, 3, 4, 5, 6, 7).take(ParallelSpec(2), "m", layout(3, 2, sp=2)) == layout(3, 2, sp=2)
    assert free(2, 3, 5, 6, 7).take(ParallelSpec(2), "m") == layout(2, 3, sp=2)  # fewest that are enough


def test_branches_of_guidance_each_stay_on_a_node() -> None:
    taken = free(0, 1, 2, 4, 5).take(ParallelSpec(2, 2), "m")
    assert taken is not None and Nodes(4).crossing(taken).together == 2


@given(st.sets(st.integers(0, 15), min_size=1), st.sampled_from([1, 2, 4]), st.data())
def test_it_crosses_nodes_only_where_none_has_room(ranks: set[int], sp: int, data: st.DataObject) -> None:
    held = data.draw(st.lists(st.integers(0, 15), unique=True, min_size=1, max_size=4))
    taken = free(*sorted(ranks)).take(ParallelSpec(sp), "m", layout(*held, sp=len(held)))
    fits = max(sum(rank // 4 == node for rank in ranks) for node in range(4)) >= sp
    assert (taken is None) == (len(ranks) < sp)
    if taken is not None:
        assert set(taken.ranks) <= ranks and (len({rank // 4 for rank in taken.ranks}) == 1) == fits


POOL = [RankView(rank, None, None, frozenset({"m"}), rank // 4) for rank in range(16)]
SPECS = st.builds(ParallelSpec, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2]))


def is_on_one_node_each(taken: ExecutionLayout) -> bool:
    """Each branch of guidance."""
    return Nodes(4).crossing(taken).together == taken.parallel.sp


@given(st.sets(st.integers(0, 15)), SPECS)
def test_what_fits_is_taken_from_one_node(ranks: set[int], spec: ParallelSpec) -> None:
    ready = FreeRanks([rank for rank in POOL if rank.id in ranks], POOL)
    fits, taken = ready.fits(spec, "m"), ready.take(spec, "m")
    if spec.sp > 4:  # wider than a node
        assert fits == (taken is not None)
    else:
        assert fits == (taken is not None and is_on_one_node_each(taken))
    assert not ready.fits(spec, "another")


@given(st.sets(st.integers(0, 15)), st.sampled_from([1, 2]), SPECS, st.permutations(range(16)))
def test_a_layout_widens_on_its_nodes(ranks: set[int], size: int, spec: ParallelSpec, order: list[int]) -> None:
    ready = FreeRanks([rank for rank in POOL if rank.id in ranks], POOL)
    last = layout(*order[:4], sp=4)
    if spec.size <= size or (narrow := ready.take(ParallelSpec(size), "m", last)) is None:
        return
    before = len(ready)
    if ready.count_beside(narrow, "m", spec.size) < spec.size - size:
        return
    wider = ready.widen(narrow, spec, "m", last)
    assert wider.parallel == spec and set(wider.ranks) <= ranks and not {*wider.ranks} & {*ready.ids}
    assert len(ready) == before - (spec.size - size)
    if spec.size <= 4 and Nodes(4).crossing(narrow).together == size:
        assert {rank // 4 for rank in wider.ranks} == {rank // 4 for rank in narrow.ranks}


def test_what_is_held_is_nobody_elses() -> None:
    ready = free(0, 1, 4, 5)
    ready.hold("m", 1)
    assert {*ready.ids} == {0, 1} and not ready.claim(layout(4, sp=1))
    ready.hold("m")
    assert not ready
