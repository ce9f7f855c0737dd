"""Ranks that fail and ranks that are slow, as options of a simulation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFailure:
    """``rank`` is lost at ``at_s`` with all it holds; after ``down_s``, unless None, it joins again, empty."""

    rank: int
    at_s: float
    down_s: float | None = None

    @property
    def until_s(self) -> float:
        return math.inf if self.down_s is None else self.at_s + self.down_s

    @classmethod
    def parse(cls, text: str) -> RankFailure:
        """From ``RANK@TIME_S`` or ``RANK@TIME_S+DOWN_S``. Raises ``ValueError`` that says what is allowed."""
        match = re.fullmatch(r"(\d+)@([^+]+)(?:\+(.+))?", text)
        try:
            if match is None:
                raise ValueError
            rank, at_s, down_s = match.groups()
            return cls(int(rank), _seconds(at_s), None if down_s is None else _seconds(down_s))
        except ValueError:
            raise ValueError(
                f"a rank failure must be RANK@TIME_S or RANK@TIME_S+DOWN_S, times not negative, got {text!r}"
            ) from None


@dataclass(frozen=True, slots=True)
class SlowRank:
    """From ``from_s`` to ``to_s`` rank ``rank`` takes ``factor`` times as long."""

    rank: int
    factor: float
    from_s: float = 0.0
    to_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> SlowRank:
        """From ``RANK@FACTOR`` or ``RANK@FACTOR:FROM_S-TO_S``. Raises ``ValueError`` that says what is allowed."""
        match = re.fullmatch(r"(\d+)@([^:]+)(?::([^-]+)-([^-]+))?", text)
        try:
            if match is None:
                raise ValueError
            rank, factor, from_s, to_s = match.groups()
            slow = cls(int(rank), _seconds(factor))
            if from_s is not None:
                slow = cls(slow.rank, slow.factor, _seconds(from_s), _seconds(to_s))
            if slow.factor <= 0 or slow.to_s <= slow.from_s:
                raise ValueError
            return slow
        except ValueError:
            raise ValueError(
                "a slow rank must be RANK@FACTOR or RANK@FACTOR:FROM_S-TO_S, the factor positive and "
                f"FROM_S before TO_S, got {text!r}"
            ) from None


def check_failures(failures: Sequence[RankFailure], num_ranks: int) -> None:
    """Raise ``ValueError`` for a rank that does not exist, or that is to fail while it is down."""
    up_from_s: dict[int, float] = {}
    for failure in sorted(failures, key=lambda failure: failure.at_s):
        _check_rank(failure.rank, num_ranks)
        if failure.at_s < up_from_s.get(failure.rank, 0.0):
            raise ValueError(f"rank {failure.rank} fails at {failure.at_s} s, but is down until it joins again")
        up_from_s[failure.rank] = failure.until_s


def check_slow_ranks(slow_ranks: Sequence[SlowRank], num_ranks: int) -> None:
    """Raise ``ValueError`` for a rank that does not exist."""
    for slow in slow_ranks:
        _check_rank(slow.rank, num_ranks)


class Slowness:
    """How long work takes on ranks of which some are slow at times: at any time as long as on the slowest."""

    def __init__(self, slow_ranks: Sequence[SlowRank]) -> None:
        self._slow_ranks = tuple(slow_ranks)

    def end_s(self, start_s: float, seconds: float, ranks: Sequence[int]) -> float:
        """When work ends that starts at ``start_s`` and takes ``seconds`` on ranks at full speed."""
        slow = [slow for slow in self._slow_ranks if slow.rank in ranks and slow.to_s > start_s]
        while slow:
            factor = max((s.factor for s in slow if s.from_s <= start_s < s.to_s), default=1.0)
            changes_s = [time_s for s in slow for time_s in (s.from_s, s.to_s) if time_s > start_s]
            change_s = min(changes_s)
            if start_s + seconds * factor <= change_s:
                return start_s + seconds * factor
            seconds -= (change_s - start_s) / factor
            start_s = change_s
            slow = [s for s in slow if s.to_s > start_s]
        return start_s + seconds


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


def _check_rank(rank: int, num_ranks: int) -> None:
    if rank >= num_ranks:
        raise ValueError(f"there is no rank {rank}, ranks: 0 to {num_ranks - 1}")
