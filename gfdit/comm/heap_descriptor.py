"""What the ranks of a world share about their heap: enough for each of them to attach to it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from gfdit.comm.layout import SegmentLayout

_OWN_FILES = "/proc/self/fd"
_DELETED = " (deleted)"  # what the system adds to the name of an open file that has none any more
BESIDE_LANE = "beside"  # what runs beside the compute lane, and belongs to it
DEFAULT_LANES = ("compute", "migration", BESIDE_LANE)


@dataclass(frozen=True, slots=True)
class HeapDescriptor:
    """All a rank needs to attach. Pickles, and goes through JSON with ``to_json`` / ``from_json``.

    ``path`` is a file where the ranks meet. ``slot_bytes`` is the size of a data slot, of which there are four per
    lane and unordered pair of ranks; what the other sizes are is said in ``gfdit.comm.layout``. ``selector_table``
    is a file of measurements, see ``gfdit.comm.selector_table``; without one, paths are chosen by rule.
    ``devices`` names the one of each rank, see ``gfdit.comm.devices``; without, and on a CPU, there is nothing to
    choose.
    """

    path: str
    session: int
    world_size: int
    lanes: tuple[str, ...]
    slot_bytes: int = 256 * 1024
    scratch_bytes: int = 0
    low_latency_bytes: int = 0
    export_bytes: int = 0
    multicast_bytes: int = 0
    place_bytes: int = 0
    kind: str = "shared_memory"
    selector_table: str = ""
    devices: tuple[str, ...] = ()

    @classmethod
    def make(cls, kind: str, world_size: int, lanes: Sequence[str], **sizes: int) -> HeapDescriptor:
        """With a new session and no path. Raises ValueError for lanes of the same name and for bad sizes."""
        if len(set(lanes)) != len(lanes):
            raise ValueError(f"lane names must differ, got {tuple(lanes)}")
        descriptor = cls(
            "", secrets.randbits(63), world_size, tuple(lanes), kind=kind, selector_table="", devices=(), **sizes
        )
        _ = descriptor.layout  # checks sizes
        return descriptor

    @property
    def layout(self) -> SegmentLayout:
        return SegmentLayout(
            self.world_size,
            len(self.lanes),
            self.slot_bytes,
            self.scratch_bytes,
            self.low_latency_bytes,
            self.export_bytes,
            self.multicast_bytes,
            self.place_bytes,
        )

    def check_rank(self, rank: int) -> None:
        """Raises ValueError for a rank that is not in the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HeapDescriptor:
        fields = json.loads(text)
        return cls(**{**fields, "lanes": tuple(fields["lanes"]), "devices": tuple(fields["devices"])})

    def held_open(self) -> HeapDescriptor:
        """The same heap without a name: an open file of this process stands for it, until ``unlink``.

        Ranks may attach at any time, also one that replaces another, and nothing is left whatever is killed. Where
        the system does not show a process's files the heap keeps its name.
        """
        if not os.path.isdir(_OWN_FILES):
            return self
        file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.unlink()
        return replace(self, path=f"/proc/{os.getpid()}/fd/{file}")

    def unlink(self) -> None:
        """Remove the name, or close the file. For the owner, once nobody will attach; harmless twice."""
        with contextlib.suppress(FileNotFoundError):
            if not self.path.startswith("/proc/"):
                os.unlink(self.path)
            elif _DELETED in os.readlink(self.path):
                os.close(int(self.path.rpartition("/")[2]))


class Lanes:
    """Which lanes of a heap are open: each once, since whoever opens it owns the counters."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self._rank = rank
        self._names = tuple(names)
        self._opened: set[str] = set()
        self.closed = False

    def open(self, lane: str) -> int:
        """Index of ``lane``. Raises ValueError if it is unknown or open already, or the heap closed."""
        if self.closed:
            raise ValueError(f"the heap of rank {self._rank} is closed")
        if lane not in self._names:
            raise ValueError(f"unknown lane {lane!r}; this heap has {', '.join(self._names)}")
        if lane in self._opened:
            raise ValueError(f"lane {lane!r} of rank {self._rank} is already open; use comm.lane({lane!r})")
        self._opened.add(lane)
        return self._names.index(lane)
