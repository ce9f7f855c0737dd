"""Plans of transfers: every byte that is needed and lacking moves once, nothing else, in an order that ends."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core.artifacts import transfers
from gfdit.core.artifacts.transfers import Transfer, plan_transfers
from gfdit.core.artifacts.views import ArtifactView, Box, FieldView
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from tests.migration.artifacts import (
    MAX_RANKS,
    Element,
    Held,
    come_to_rest,
    elements,
    lacking,
    layouts,
    num_bytes,
    part_of,
    views,
)

WALKS = st.lists(layouts(), min_size=2, max_size=4)
IDLE = st.sets(st.integers(0, MAX_RANKS - 1))
TOKENS = FieldView("tokens", "float32", 4, (12,), sp_dim=0)
SPLIT, COPIED = ArtifactView((TOKENS,)), ArtifactView((FieldView("whole", "float32", 4, (12,)),))


def on(*ranks: int, cfg: int = 1) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(len(ranks) // cfg, cfg))


def held_under(layout: ExecutionLayout) -> Held:
    return dict.fromkeys(layout.ranks, layout)


def check_plan(view: ArtifactView, held: Held, target: ExecutionLayout, idle: set[int]) -> None:
    plan = plan_transfers(view, held, target, idle)
    have = {rank: part_of(view, layout, rank) for rank, layout in held.items()}
    needed = lacking(view, held, target)
    came: dict[int, Counter[Element]] = {rank: Counter() for rank in target.ranks}
    told: Counter[int] = Counter()
    moved_bytes = 0
    for transfer in plan.transfers:
        for piece in transfer.pieces:
            some = elements(piece.index, piece.box)
            assert some and some <= have[transfer.source], "a source sends what it has"
            for rank in transfer.destinations:
                came[rank].update(some)
        told.update(transfer.destinations if transfer.metadata else ())
        moved_bytes += transfer.num_bytes * len(transfer.destinations)
        assert transfer.source in held and set(transfer.ranks) <= set(plan.ranks)
    assert came == {rank: Counter(some) for rank, some in needed.items()}, "what is lacking comes once"
    assert moved_bytes == sum(num_bytes(view, some) for some in needed.values()), "not a byte more"
    assert told == Counter(rank for rank in target.ranks if rank not in held), "metadata for newcomers"
    fits = view.fits(held, target)
    assert fits == (not plan.ranks) and len(set(plan.ranks)) == len(plan.ranks)
    ways = [transfer.ranks for transfer in plan.transfers]
    assert len({(source, tuple(sorted(rest))) for source, *rest in ways}) == len(ways), "one transfer a way"
    assert come_to_rest({rank: [t for t in plan.transfers if rank in t.ranks] for rank in plan.ranks})


@settings(max_examples=60)
@given(view=views(), walk=WALKS, idle=IDLE, riding_bytes=st.sampled_from([0, 100]))
def test_every_byte_that_is_needed_and_lacking_moves_once(
    view: ArtifactView, walk: list[ExecutionLayout], idle: set[int], riding_bytes: int
) -> None:
    """From layout to layout; ranks that a layout leaves keep what they have, as they do until it is freed."""
    held = held_under(walk[0])
    for target in walk[1:]:
        with patch.object(transfers, "RIDING_BYTES", riding_bytes):
            check_plan(view, held, target, idle)
        held |= held_under(target)


@settings(max_examples=40)
@given(view=views(), walk=WALKS)
def test_the_same_question_has_the_same_answer(view: ArtifactView, walk: list[ExecutionLayout]) -> None:
    held = held_under(walk[0])
    backwards = dict(reversed(held.items()))
    assert plan_transfers(view, held, walk[1]) == plan_transfers(view, backwards, walk[1])


def test_growing_sends_to_newcomers_and_shrinking_sends_nothing() -> None:
    grown = plan_transfers(COPIED, held_under(on(0, 1)), on(0, 1, 2, 3))
    assert [(transfer.source, transfer.destinations) for transfer in grown.transfers] == [(0, (2,)), (1, (3,))]
    assert plan_transfers(COPIED, held_under(on(0, 1, 2, 3)), on(2, 1)).ranks == ()


def test_one_source_broadcasts() -> None:
    (transfer,) = plan_transfers(COPIED, held_under(on(2)), on(2, 0, 1, 3)).transfers
    assert (transfer.source, transfer.destinations, transfer.num_bytes) == (2, (0, 1, 3), 48)


def test_a_split_field_that_shrinks_sends_only_what_is_lacking() -> None:
    plan = plan_transfers(SPLIT, held_under(on(0, 1, 2, 3)), on(0, 1))
    boxes: dict[tuple[int, ...], list[Box]] = {t.ranks: [piece.box for piece in t.pieces] for t in plan.transfers}
    assert boxes == {(1, 0): [((3, 6),)], (2, 1): [((6, 9),)], (3, 1): [((9, 12),)]}


def test_guidance_branches_are_split_outermost() -> None:
    both = ArtifactView((FieldView("x", "uint8", 1, (8,), sp_dim=0, cfg_dim=0),))
    layout = on(3, 1, 0, 2, cfg=2)
    assert [both.fields[0].box(layout, rank) for rank in (3, 1, 0, 2)] == [((i, i + 2),) for i in (0, 2, 4, 6)]


def test_sources_are_those_that_wait_anyway_then_idle_ones() -> None:
    held = held_under(on(0, 1, 2))
    assert {t.source for t in plan_transfers(COPIED, held, on(2, 3, 4), idle={1}).transfers} == {2}
    assert {t.source for t in plan_transfers(COPIED, held, on(3, 4), idle={1}).transfers} == {1}
    assert {t.source for t in plan_transfers(COPIED, held, on(3, 4)).transfers} == {0, 1}


def test_what_is_small_rides_along() -> None:
    both = ArtifactView((TOKENS, FieldView("step", "int64", 8, ())))
    plan = plan_transfers(both, held_under(on(0, 1)), on(0, 1, 2, 3))
    assert {transfer.ranks: transfer.metadata for transfer in plan.transfers} == {
        (0, 1): False,
        (1, 2): True,
        (1, 3): True,
    }


def test_disjoint_transfers_come_first_so_that_they_run_at_the_same_time() -> None:
    plan = plan_transfers(SPLIT, held_under(on(0, 1)), on(2, 3, 4, 5))
    first = plan.transfers[:2]
    assert set(first[0].ranks).isdisjoint(first[1].ranks)


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"ranks \(0,\) need what no rank holds"):
        plan_transfers(SPLIT, {1: on(1, 2)}, on(0))


def test_whole_is_what_is_covered() -> None:
    layout = on(0, 1, 2)
    assert SPLIT.covered_by(held_under(layout)) and not SPLIT.covered_by({0: layout, 2: layout})
    assert SPLIT.covered_by({0: layout, 2: layout, 5: on(4, 5)}) is False
    assert SPLIT.covered_by({0: layout, 1: layout, 5: on(4, 5)})
    assert COPIED.covered_by({2: layout}) and not COPIED.covered_by({})


# Negative controls


def test_a_planner_that_sends_too_much_is_found() -> None:
    def everything(
        field: FieldView, held: Held, target: ExecutionLayout
    ) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]]:
        return {((rank,), target.ranks): [field.box(layout, rank)] for rank, layout in held.items()}

    held, target = held_under(on(0, 1)), on(2, 3, 4, 5)
    check_plan(SPLIT, held, target, set())
    with patch.object(transfers, "_lacking", everything), pytest.raises(AssertionError, match="comes once"):
        check_plan(SPLIT, held, target, set())


def test_ranks_that_order_their_transfers_differently_wait_for_each_other() -> None:
    plan = plan_transfers(SPLIT, held_under(on(0, 1, 2)), on(2, 0, 1))
    queues: dict[int, list[Transfer]] = {
        rank: [transfer for transfer in plan.transfers if rank in transfer.ranks] for rank in plan.ranks
    }
    assert come_to_rest(queues)
    ends = [come_to_rest({**queues, rank: queue[::-1]}) for rank, queue in queues.items()]
    assert ends.count(False) == 1, "of three in a ring, the one whose first transfer nobody else has first"
