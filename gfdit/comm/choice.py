"""How an exchange may be carried out, and what every member of it knows when it chooses.

A choice is part of the digest that tokens carry: members that chose differently get CommMismatch, never wrong
data. So it may rest on nothing but what all of them share.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gfdit.comm.heap import Operation
from gfdit.comm.layout import SegmentLayout


class Path(StrEnum):
    """How bytes travel. See the module of the kernel with that name for its range."""

    BARRIER = "barrier"
    LOW_LATENCY = "low_latency"
    PUSH = "push"
    DIRECT_PULL = "direct_pull"
    DIRECT_PUSH = "direct_push"
    COPY_ENGINE = "copy_engine"
    TMA = "tma"
    MULTICAST = "multicast"

    @property
    def protocol(self) -> Path:
        """What members must have in common: tiles are a way of copying, which each rank may do as it can."""
        return Path.PUSH if self is Path.TMA else self


@dataclass(frozen=True, slots=True)
class Choice:
    """A path with its parameters; equal in all members. ``chunk_bytes`` is a multiple of 16."""

    path: Path
    chunk_bytes: int
    num_programs: int

    def __str__(self) -> str:
        chunks = f"chunks of {self.chunk_bytes} bytes, " if self.chunk_bytes else ""
        return f"{self.path} ({chunks}{self.num_programs} program{'s' * (self.num_programs > 1)})"


class Situation(NamedTuple):
    """One exchange as all its members see it. ``num_bytes``: the most on any edge; None if only some know.

    ``source_in_heap``, ``target_in_heap``: input and output are heap tensors, in every member or in none.
    """

    operation: Operation
    group_size: int
    num_bytes: int | None
    source_in_heap: bool = False
    target_in_heap: bool = False

    def __str__(self) -> str:
        size = "uneven parts" if self.num_bytes is None else f"{self.num_bytes} bytes per peer"
        ends = [name for name, there in zip(("from", "to"), self[3:], strict=True) if there]
        where = f", {' and '.join(ends)} the heap" if ends else ""
        return f"{self.operation.name.lower()} of {self.group_size} ranks, {size}{where}"


@dataclass(frozen=True, slots=True)
class Site:
    """What is the same for all exchanges of a lane. ``capability``: 90 means 9.0; 0 is the interpreter."""

    layout: SegmentLayout
    hardware: str
    capability: int
    has_multicast: bool
