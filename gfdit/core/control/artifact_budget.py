"""How much memory artifacts may take: a request starts when there is room for all it will hold."""

from __future__ import annotations

import math

from gfdit.core.tasks import Request, Shape

# By then a request has all its artifacts, and its solver's history has grown to its full length.
SETTLED_STEPS = 3


class ArtifactBudget:
    """Reserves for every started request the most bytes that its artifacts, each whole, take at one time.

    A rank holds each artifact of a started request at most once. So while reservations are right no rank holds
    more than ``limit_bytes``, whatever the policy does. What a request takes is learned from those before it: from
    its shape, else from another one in proportion to the tokens. Where nothing is known, and where one request
    alone is too large, it starts when no other has.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """None for no limit. Raises ``ValueError`` for one that is not positive."""
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"max_artifact_bytes must be at least 1, got {limit_bytes}")
        self.limited = limit_bytes is not None
        self._limit_bytes = math.inf if limit_bytes is None else limit_bytes
        self._reserved: dict[str, float] = {}
        self._peaks: dict[tuple[str, bool], dict[Shape, int]] = {}  # by model and guidance

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
        peaks = self._peaks.setdefault((request.model, request.cfg), {})
        peaks[request.shape] = max(peak_bytes, peaks.get(request.shape, 0))
        self._reserved[request.id] = max(peak_bytes, self._expected(request))

    def release(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)

    def check_integrity(self, started: set[str]) -> None:
        assert not self.limited or self._reserved.keys() == started, "memory is reserved for the wrong requests"

    def _expected(self, request: Request) -> float:
        peaks = self._peaks.get((request.model, request.cfg))
        if not peaks:
            return self._limit_bytes
        if request.shape in peaks:
            return peaks[request.shape]
        tokens = request.shape.num_tokens
        return max([peak * max(1.0, tokens / shape.num_tokens) for shape, peak in peaks.items()])
