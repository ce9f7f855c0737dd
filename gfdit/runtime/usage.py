"""How much memory the ranks' artifacts take, told to the engine for its metrics."""

from __future__ import annotations

import time

from gfdit.core import ControlPlane
from gfdit.runtime import messages as msg

INTERVAL_S = 0.5


class UsageReports:
    """At most one report in ``INTERVAL_S``, but always one when the last request has ended."""

    def __init__(self, plane: ControlPlane, num_ranks: int) -> None:
        self._plane = plane
        self._told = [0] * num_ranks
        self._next_s = 0.0

    def due(self) -> msg.ArtifactBytes | None:
        """What to report now, if anything."""
        now_s = time.monotonic()
        if now_s < self._next_s and self._plane.state.requests:
            return None
        held = self._plane.state.artifact_bytes()
        by_rank = [held.get(rank, 0) for rank in range(len(self._told))]
        if by_rank == self._told:
            return None
        self._told, self._next_s = by_rank, now_s + INTERVAL_S
        return msg.ArtifactBytes(by_rank)
