"""What an artifact consists of, and which part each rank of a layout holds (GF-DiT paper, sections 5.2, 5.3).

A codec makes the view where the artifact is made; from there on layouts alone say who holds what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise, product
from math import prod

from msgspec import Struct

from gfdit.core.layouts import ExecutionLayout

Range = tuple[int, int]
"""Half-open."""

Box = tuple[Range, ...]
"""A part of a tensor: one range per dimension."""


class FieldView(Struct, frozen=True, gc=False):
    """One tensor of an artifact: its global ``shape``, ``dtype`` by torch's name and ``item_bytes`` of an element.

    ``sp_dim`` is split over the sequence shards of a layout and ``cfg_dim`` over its guidance branches, each as
    evenly as possible, longer parts first; one dimension may be both, branches outermost. With neither the field
    is replicated. ``on_host``: it stays in host memory whatever the device.
    """

    name: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    sp_dim: int | None = None
    cfg_dim: int | None = None
    on_host: bool = False

    @property
    def sharded(self) -> bool:
        return self.sp_dim is not None or self.cfg_dim is not None

    @property
    def whole(self) -> Box:
        return tuple([(0, extent) for extent in self.shape])

    def box(self, layout: ExecutionLayout, rank: int) -> Box:
        """What ``rank`` holds under ``layout``."""
        if not self.sharded:
            return self.whole
        ranges = list(self.whole)
        sp, cfg = layout.parallel
        branch, shard = divmod(layout.ranks.index(rank), sp)
        for dim, part, num_parts in ((self.cfg_dim, branch, cfg), (self.sp_dim, shard, sp)):
            if dim is not None:
                ranges[dim] = _share(ranges[dim], part, num_parts)
        return tuple(ranges)

    def num_bytes(self, box: Box) -> int:
        return self.item_bytes * volume(box)


class ArtifactView(Struct, frozen=True, gc=False):
    """The tensor fields of an artifact. What else it consists of, its metadata, every holder has whole."""

    fields: tuple[FieldView, ...] = ()

    @property
    def sharded(self) -> bool:
        return any([field.sharded for field in self.fields])

    @property
    def num_bytes(self) -> int:
        """Of the whole artifact, without metadata."""
        return sum([field.num_bytes(field.whole) for field in self.fields])

    def held_bytes(self, layout: ExecutionLayout, rank: int) -> int:
        """What ``rank`` holds under ``layout``, without metadata."""
        return sum([field.num_bytes(field.box(layout, rank)) for field in self.fields])

    def same_part(self, rank: int, one: ExecutionLayout, other: ExecutionLayout) -> bool:
        """Whether ``rank`` holds the same under both."""
        return all([field.box(one, rank) == field.box(other, rank) for field in self.fields if field.sharded])

    def fits(self, held: Mapping[int, ExecutionLayout], target: ExecutionLayout) -> bool:
        """Whether every rank of ``target`` holds what it needs under it, and nothing else, already."""
        for rank in target.ranks:
            if rank not in held:
                return False
        return not self.sharded or all([self.same_part(rank, held[rank], target) for rank in target.ranks])

    def covered_by(self, held: Mapping[int, ExecutionLayout]) -> bool:
        """Whether the ranks of ``held`` together, each with its part under its layout, have all of it."""
        if not held:
            return False
        for field in self.fields:
            if field.sharded:
                boxes = [field.box(layout, rank) for rank, layout in held.items()]
                if not all(any(contains(box, cell) for box in boxes) for cell in cells([field.whole, *boxes])):
                    return False
        return True


UNKNOWN = ArtifactView()
"""Of an artifact about which nothing was reported: metadata alone, replicated."""


def volume(box: Box) -> int:
    """Number of elements."""
    return prod([end - begin for begin, end in box])


def contains(outer: Box, inner: Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def inside(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where ``inner`` is in a tensor that holds ``outer``."""
    return tuple([slice(i[0] - o[0], i[1] - o[0]) for o, i in zip(outer, inner, strict=True)])


def intersection(one: Box, other: Box) -> Box | None:
    """None if they have no element in common."""
    box = tuple([(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True)])
    return box if all([begin < end for begin, end in box]) else None


def cells(boxes: Iterable[Box]) -> list[Box]:
    """The non-empty parts into which the borders of ``boxes`` cut their hull: each is in a box, or outside it."""
    borders = [sorted({border for part in ranges for border in part}) for ranges in zip(*boxes, strict=True)]
    return [cell for cell in product(*map(pairwise, borders)) if volume(cell)]


def _share(whole: Range, part: int, num_parts: int) -> Range:
    begin, end = whole
    least, longer = divmod(end - begin, num_parts)
    begin += part * least + min(part, longer)
    return begin, begin + least + (part < longer)
