"""How much memory artifacts may take: a request starts when there is room for all it will hold."""

from __future__ import annotations

import math

from gfdit.core.bounded import RecentDict
from gfdit.core.tasks import Request, Shape

# By then a request has all its artifacts, and its solver's history has grown to its full length.
SETTLED_STEPS = 3
MAX_SHAPES = 4096  # of one model and guidance whose own peak is known, in less than 1 MB


class PeakBytes:
    """The most bytes that requests of one model and guidance have taken at one time, by shape.

    A shape that is not known, or no longer, is taken for another one in proportion to the tokens, but not for less
    than that one takes, and among all those seen for the one by which it is largest. That is either the one that
    took most or the one that took most per token: these two say the same of a new shape as all together.
    """

    def __init__(self) -> None:
        self._by_shape: RecentDict[Shape, int] = RecentDict(MAX_SHAPES)
        self._largest = 0
        self._densest, self._densest_tokens = 0, 1

    @property
    def num_shapes(self) -> int:
        return len(self._by_shape)

    def add(self, shape: Shape, peak_bytes: int) -> None:
        peak_bytes = max(peak_bytes, self._by_shape.get(shape) or 0)
        self._by_shape[shape] = peak_bytes
        self._largest = max(self._largest, peak_bytes)
        if peak_bytes * self._densest_tokens > self._densest * shape.num_tokens:
            self._densest, self._densest_tokens = peak_bytes, shape.num_tokens

    def expected(self, shape: Shape) -> float:
        if (peak_bytes := self._by_shape.get(shape)) is not None:
            return peak_bytes
        return max(self._largest, self._densest * (shape.num_tokens / self._densest_tokens))


class ArtifactBudget:
    """Reserves for every started request the most bytes that its artifacts, each whole, take at one time.

    A rank holds each artifact of a started request at most once. So while reservations are right no rank holds
    more than ``limit_bytes``, whatever the policy does. What a request takes is learned from those before it: from
    its shape, else from others in proportion to the tokens. Where nothing is known, and where one request
    alone is too large, it starts when no other has.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """None for no limit. Raises ``ValueError`` for one that is not positive."""
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"max_artifact_bytes must be at least 1, got {limit_bytes}")
        self.limited = limit_bytes is not None
        self._limit_bytes = math.inf if limit_bytes is None else limit_bytes
        self._reserved: dict[str, float] = {}
        self._peaks: dict[tuple[str, bool], PeakBytes] = {}  # by model and guidance

    def fits(self, request: Request) -> bool:
        if not self._reserved:
            return True
        return sum(self._reserved.values()) + self._expected(request) <= self._limit_bytes

    def reserve(self, request: Request) -> None:
        self._reserved[request.id] = self._expected(request)

    def observe(self, request: Request, peak_bytes: int, steps_done: int) -> None:
        """The artifacts of a started request have taken ``peak_bytes`` so far; the first steps say nothing yet."""
        if steps_done < min(SETTLED_STEPS, request.num_steps):
            return
        if (peaks := self._peaks.get((request.model, request.cfg))) is None:
            peaks = self._peaks[request.model, request.cfg] = PeakBytes()
        peaks.add(request.shape, peak_bytes)
        self._reserved[request.id] = max(peak_bytes, self._expected(request))

    def release(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)

    def check_integrity(self, started: set[str]) -> None:
        assert not self.limited or self._reserved.keys() == started, "memory is reserved for the wrong requests"

    def _expected(self, request: Request) -> float:
        peaks = self._peaks.get((request.model, request.cfg))
        return self._limit_bytes if peaks is None else peaks.expected(request.shape)
