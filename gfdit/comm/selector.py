"""Which path an exchange takes, in chunks of which size, by how many programs: measured, else by rule.

Deterministic, from nothing but what all members share. A table says what was measured; between two sizes the time
of a candidate is interpolated in the logarithms of bytes and seconds, and the fastest one that is possible is
taken. Outside the sizes measured, what was best at the nearest of them.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gfdit.comm.choice import Choice, Path, Site, Situation
from gfdit.comm.heap import Operation
from gfdit.comm.layout import MAX_CHUNKS, MAX_PROGRAMS
from gfdit.comm.selector_table import SelectorTable

Obstacle = Callable[[Situation, Site], str | None]

# Exchanges whose parts only some members know: the same for all of them.
_UNEVEN_PROGRAMS = 32
# A program that pushes less than this is mostly waiting.
_BYTES_PER_PROGRAM = 32 * 1024
_MIN_CHUNK_BYTES = 4096
# What a program copies in a turn: larger chunks would only keep the peer from draining the first of them.
_TURN_BYTES = 64 * 1024
# What a program moves at once, and enough programs for a few such turns of the largest messages.
_LOW_LATENCY_BYTES_PER_PROGRAM = 4096
_MOST_LOW_LATENCY_PROGRAMS = 32
# An exchange of heads of less than this in all would wait longer for the peers' places than to drain its slots.
_DIRECT_BYTES = 1 << 20
# What rules choose from, and what is worth measuring.
NUM_PROGRAMS = (1, 8, 32, 64)
_MEASURED_PROGRAMS = (1, 2, 4, 8, 16, 32, 64)
# What goes one way goes beside compute, which wants most of the multiprocessors.
_MOST_ONE_WAY_PROGRAMS = 32
_PATHS_OF_ONE_PROGRAM = (Path.BARRIER, Path.COPY_ENGINE)
_PATHS_WITH_CHUNKS = (Path.PUSH, Path.TMA)
_ONE_WAY = (Operation.BROADCAST, Operation.SEND)
_ONE_WAY_PATHS = (Path.LOW_LATENCY, Path.PUSH, Path.MULTICAST)
_HEADS = (Operation.SCATTER_HEADS, Operation.GATHER_HEADS)
# Heads through data slots, or into a place that is large enough.
_INTO_PLACE = (Path.DIRECT_PUSH, Path.COPY_ENGINE)

logger = logging.getLogger("gfdit.comm")


class Selector:
    """Chooses for one lane. ``obstacles`` has an entry for each path there is; None from it means possible.

    ``version`` changes when choices do. Raises ValueError for a table measured with slots so small that its chunks
    do not suit this heap.
    """

    def __init__(self, site: Site, obstacles: Mapping[Path, Obstacle], table: SelectorTable | None = None) -> None:
        self._site = site
        self._obstacles = obstacles
        self._table = table
        self._measured: dict[tuple[Operation, int], dict[Choice, dict[int, float]]] = {}
        for entry in table.entries if table else ():
            _check_chunks(entry.choice, site.layout.slot_bytes)
            candidates = self._measured.setdefault((entry.operation, entry.group_size), defaultdict(dict))
            candidates[entry.choice][entry.num_bytes] = entry.seconds
        if table and site.hardware not in table.hardware:
            logger.warning("collectives go by what was measured on %s, this is %s", table.hardware, site.hardware)
        self._forced: Callable[[Situation], Choice] | None = None
        self.version = 0

    @property
    def site(self) -> Site:
        return self._site

    def choose(self, situation: Situation) -> Choice:
        """Equal in all members."""
        if self._forced is not None:
            return self._forced(situation)
        ranking = self._ranking(situation)
        return ranking[0][1] if ranking else self._by_rule(situation)

    def force(self, choose: Callable[[Situation], Choice] | None) -> None:
        """For measurements and tests: from now on go by ``choose``, the same in all members; None: as ever."""
        self._forced = choose
        self.version += 1

    @contextmanager
    def forced(self, choice: Choice | None) -> Iterator[None]:
        """Inside, everything goes that way; None: as before."""
        before = self._forced
        if choice is not None:
            self.force(lambda situation: choice)
        try:
            yield
        finally:
            self.force(before)

    def candidates(self, situation: Situation) -> list[Choice]:
        """What is worth measuring: every possible path, with several numbers of programs if they run at once."""
        paths = [path for path in self._obstacles if self._is_possible(path, situation)]
        if Path.BARRIER in paths:
            paths = [Path.BARRIER]
        slot_bytes, found = self._site.layout.slot_bytes, []
        num_bytes = slot_bytes if situation.num_bytes is None else situation.num_bytes
        for path in paths:
            one = path in _PATHS_OF_ONE_PROGRAM or self._site.capability == 0
            for num_programs in (1,) if one else _MEASURED_PROGRAMS:
                chunked = path in _PATHS_WITH_CHUNKS
                chunk_bytes = push_chunk_bytes(slot_bytes, num_bytes, num_programs) if chunked else 0
                found.append(Choice(path, chunk_bytes, num_programs))
        return found

    def explain(self, situation: Situation) -> str:
        """The choice with its reason, what came next, and what was not possible, in one line."""
        choice, parts = self.choose(situation), []
        ranking = self._ranking(situation)
        if ranking and choice == ranking[0][1] and self._table is not None:
            parts.append(f"{ranking[0][0] * 1e6:.1f} us by the table of {self._table.hardware}")
            parts += [f"{other}: {seconds * 1e6:.1f} us" for seconds, other in ranking[1:3]]
        else:
            why = "uneven parts" if situation.num_bytes is None else "nothing measured that fits"
            parts.append(f"by rule ({why})")
        for path in self._obstacles:
            if reason := self.obstacle(path, situation):
                parts.append(f"{path} is not possible: {reason}")
        return f"{situation}: {choice}, {'; '.join(parts)}"

    def _ranking(self, situation: Situation) -> list[tuple[float, Choice]]:
        """Possible measured candidates with their predicted seconds, fastest first."""
        candidates = self._candidates(situation)
        if not candidates or situation.num_bytes is None:
            return []
        sizes = sorted({size for measured in candidates.values() for size in measured})
        num_bytes = min(max(situation.num_bytes, sizes[0]), sizes[-1])
        ranking = []
        for choice, measured in candidates.items():
            if min(measured) <= num_bytes <= max(measured) and self._is_possible(choice.path, situation):
                ranking.append((interpolate(measured, num_bytes), choice))
        return sorted(ranking, key=lambda pair: (pair[0], str(pair[1])))

    def _candidates(self, situation: Situation) -> Mapping[Choice, dict[int, float]]:
        """Measured at the group size nearest to the asked one, the larger of two."""
        sizes = [size for operation, size in self._measured if operation == situation.operation]
        if not sizes:
            return {}
        nearest = min(sizes, key=lambda size: (abs(math.log(size / situation.group_size)), -size))
        return self._measured[situation.operation, nearest]

    def obstacle(self, path: Path, situation: Situation) -> str | None:
        """Why ``path`` cannot serve ``situation`` here; None if it can."""
        if path not in self._obstacles:
            return "there is no such path"
        if situation.operation in _ONE_WAY and path not in _ONE_WAY_PATHS:
            return "it is for exchanges"
        if situation.operation in _HEADS:
            if path in _INTO_PLACE:
                return None if situation.target_in_heap else "the outputs do not fit into a place"
            return None if path is Path.PUSH else "it copies bytes, not heads"
        return self._obstacles[path](situation, self._site)

    def _is_possible(self, path: Path, situation: Situation) -> bool:
        return self.obstacle(path, situation) is None

    def _low_latency_programs(self, situation: Situation) -> int:
        if self._site.capability == 0 or not situation.num_bytes:
            return 1
        total = situation.num_bytes * situation.group_size
        return min(-(-total // _LOW_LATENCY_BYTES_PER_PROGRAM), _MOST_LOW_LATENCY_PROGRAMS)

    def _by_rule(self, situation: Situation) -> Choice:
        if self._is_possible(Path.BARRIER, situation):
            return Choice(Path.BARRIER, chunk_bytes=0, num_programs=1)
        if self._is_possible(Path.LOW_LATENCY, situation):
            return Choice(Path.LOW_LATENCY, 0, self._low_latency_programs(situation))
        slot_bytes = self._site.layout.slot_bytes
        path = Path.PUSH
        if situation.operation in _HEADS:
            total = (situation.num_bytes or 0) * (situation.group_size - 1)
            if situation.target_in_heap and total >= _DIRECT_BYTES:
                path = Path.DIRECT_PUSH
        elif situation.source_in_heap or situation.target_in_heap:
            path = Path.DIRECT_PULL if situation.source_in_heap else Path.DIRECT_PUSH
        if self._site.capability == 0:  # interpreted: one program, few chunks
            return Choice(path, chunk_bytes=max(slot_bytes // 4 // 16 * 16, 16), num_programs=1)
        if situation.num_bytes is None:
            return Choice(path, push_chunk_bytes(slot_bytes, slot_bytes, MAX_PROGRAMS), _UNEVEN_PROGRAMS)
        total = situation.num_bytes * max(situation.group_size - 1, 1)
        most = _MOST_ONE_WAY_PROGRAMS if situation.operation in _ONE_WAY else NUM_PROGRAMS[-1]
        wanted = min(-(-total // _BYTES_PER_PROGRAM), most)
        num_programs = next(number for number in NUM_PROGRAMS if number >= wanted)
        return Choice(path, push_chunk_bytes(slot_bytes, situation.num_bytes, num_programs), num_programs)


def _check_chunks(choice: Choice, slot_bytes: int) -> None:
    if 0 < choice.chunk_bytes * MAX_CHUNKS < slot_bytes or choice.chunk_bytes % 16:
        raise ValueError(
            f"the table's chunks of {choice.chunk_bytes} bytes do not suit slots of {slot_bytes} bytes: they must "
            f"be multiples of 16, and at most {MAX_CHUNKS} to a slot"
        )


def push_chunk_bytes(slot_bytes: int, num_bytes: int, num_programs: int) -> int:
    """Chunks so that each program has one of every slot, or several if they are large; not too small.

    No more to a slot than a line has tokens for.
    """
    smallest = max(-(-slot_bytes // MAX_CHUNKS), min(_MIN_CHUNK_BYTES, slot_bytes))
    wanted = min(-(-min(num_bytes, slot_bytes) // num_programs), _TURN_BYTES)
    return -(-max(wanted, smallest) // 16) * 16


def interpolate(measured: Mapping[int, float], num_bytes: int) -> float:
    """Seconds at ``num_bytes``, which is within the sizes measured; linear between logarithms."""
    below = max(size for size in measured if size <= num_bytes)
    above = min(size for size in measured if size >= num_bytes)
    if below == above:
        return measured[below]
    share = math.log(num_bytes / max(below, 1)) / math.log(above / max(below, 1)) if num_bytes > 1 else 0.0
    return math.exp((1 - share) * math.log(measured[below]) + share * math.log(measured[above]))
