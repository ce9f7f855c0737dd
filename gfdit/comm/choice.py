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

    PUSH = "push"


@dataclass(frozen=True, slots=True)
class Choice:
    """A path with its parameters; equal in all members. ``chunk_bytes`` is a multiple of 16."""

    path: Path
    chunk_bytes: int
    num_programs: int

    def __str__(self) -> str:
        return f"{self.path} (chunks of {self.chunk_bytes} bytes, {self.num_programs} programs)"


class Situation(NamedTuple):
    """One exchange as all its members see it. ``num_bytes``: the most on any edge; None if only some know."""

    operation: Operation
    group_size: int
    num_bytes: int | None

    def __str__(self) -> str:
        size = "uneven parts" if self.num_bytes is None else f"{self.num_bytes} bytes per peer"
        return f"{self.operation.name.lower()} of {self.group_size} ranks, {size}"


@dataclass(frozen=True, slots=True)
class Site:
    """What is the same for all exchanges of a lane. ``capability``: 90 means 9.0; 0 is the interpreter."""

    layout: SegmentLayout
    hardware: str
    capability: int
    has_multicast: bool
