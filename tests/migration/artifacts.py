"""Random artifacts and layouts, and what a migration has to do between them by an independent count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from hypothesis import strategies as st

from gfdit.core.artifacts.transfers import Transfer
from gfdit.core.artifacts.views import ArtifactView, Box, FieldView
from gfdit.core.layouts import ExecutionLayout, ParallelSpec

MAX_RANKS = 8
DTYPES = {"uint8": 1, "bool": 1, "bfloat16": 2, "float32": 4, "int64": 8}
Element = tuple[int, tuple[int, ...]]  # field, coordinates
Held = dict[int, ExecutionLayout]


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int = MAX_RANKS) -> ExecutionLayout:
    specs = [(sp, cfg) for cfg in (1, 2) for sp in range(1, num_ranks + 1) if sp * cfg <= num_ranks]
    sp, cfg = draw(st.sampled_from(specs))
    ranks = draw(st.permutations(range(num_ranks)))[: sp * cfg]
    return ExecutionLayout(tuple(ranks), ParallelSpec(sp, cfg))


@st.composite
def fields(draw: st.DrawFn, name: str) -> FieldView:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dims: st.SearchStrategy[Any] = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    return FieldView(name, dtype, DTYPES[dtype], shape, draw(dims), draw(dims), on_host=True)


@st.composite
def views(draw: st.DrawFn) -> ArtifactView:
    return ArtifactView(tuple(draw(fields(f"f{index}")) for index in range(draw(st.integers(0, 4)))))


def elements(index: int, box: Box) -> set[Element]:
    return {(index, place) for place in product(*(range(*part) for part in box))}


def part_of(view: ArtifactView, layout: ExecutionLayout, rank: int) -> set[Element]:
    """What ``rank`` holds under ``layout``, element by element."""
    return {e for index, field in enumerate(view.fields) for e in elements(index, field.box(layout, rank))}


def lacking(
    view: ArtifactView, held: Mapping[int, ExecutionLayout], target: ExecutionLayout
) -> dict[int, set[Element]]:
    """What has to come to each rank: the lower bound of any plan."""
    have = {rank: part_of(view, layout, rank) for rank, layout in held.items()}
    return {rank: part_of(view, target, rank) - have.get(rank, set()) for rank in target.ranks}


def num_bytes(view: ArtifactView, some: set[Element]) -> int:
    return sum(view.fields[index].item_bytes for index, _ in some)


def come_to_rest(queues: Mapping[int, Sequence[Transfer]]) -> bool:
    """Whether ranks that run their transfers in turn, each waiting for all its members, get to the end."""
    left = {rank: list(queue) for rank, queue in queues.items()}
    moved = True
    while moved:
        moved = False
        for queue in left.values():
            if queue and all(left[rank] and left[rank][0] is queue[0] for rank in queue[0].ranks):
                transfer = queue[0]
                for rank in transfer.ranks:
                    left[rank].pop(0)
                moved = True
    return not any(left.values())
