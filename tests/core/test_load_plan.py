"""Plans of what is loaded: the best there are, by trying all."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfdit.core.cost.load_plan import (
    best_plan,
    block_by_block_s,
    greedy_plan,
    leading_full_blocks,
    naive_s,
)

SECONDS = st.integers(0, 20).map(lambda number: number / 4)
BLOCKS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=9)


def run(reads: tuple[bool, ...], blocks: list[tuple[float, float, float]]) -> float:
    loaded = computed = 0.0
    for read, (cached, full, load) in zip(reads, blocks, strict=True):
        loaded += load * read
        computed = max(computed, loaded) + cached if read else computed + full
    return computed


@given(BLOCKS)
def test_no_other_plan_is_shorter(blocks: list[tuple[float, float, float]]) -> None:
    columns = [list(column) for column in zip(*blocks, strict=True)]
    best, greedy = best_plan(*columns), greedy_plan(*columns)
    everything = [run(reads, blocks) for reads in product((False, True), repeat=len(blocks))]
    assert best.seconds == run(best.reads, blocks) == pytest.approx(min(everything))
    assert greedy.seconds == run(greedy.reads, blocks) >= best.seconds - 1e-9
    cached, _, load = columns
    assert best.seconds - 1e-9 <= block_by_block_s(cached, load) <= naive_s(cached, load) + 1e-9


def test_the_algorithm_of_the_paper_is_not_the_best() -> None:
    blocks = [[0.2] * 57, [1.0] * 57, [0.7] * 57]
    assert greedy_plan(*blocks).seconds == pytest.approx(40.1, abs=0.05)
    best = best_plan(*blocks)
    assert best.seconds == pytest.approx(26.8, abs=0.05)
    assert list(best.reads) == sorted(best.reads), "the first blocks compute all"


@given(st.integers(1, 9), SECONDS, SECONDS, SECONDS)
def test_equal_blocks_need_no_other_plan_than_leading_ones(
    num_blocks: int, cached: float, more: float, load: float
) -> None:
    """So keys and values, which allow nothing else, lose nothing by it: with a single step and room for all."""
    full = cached + more
    num_full = leading_full_blocks(num_blocks, cached, full, load, num_ahead=num_blocks, num_steps=1)
    blocks = [(cached, full, load)] * num_blocks
    reads = (False,) * num_full + (True,) * (num_blocks - num_full)
    assert run(reads, blocks) == pytest.approx(best_plan(*zip(*blocks, strict=True)).seconds)


@pytest.mark.parametrize(("num_ahead", "num_full"), [(57, 19), (8, 6), (4, 4), (0, 1)])
def test_without_room_there_is_less_to_gain(num_ahead: int, num_full: int) -> None:
    """While leading blocks compute, no more is loaded than there is room for."""
    assert leading_full_blocks(57, 0.2, 1.0, 0.7, num_ahead) == num_full
