"""Which task or copy made the artifacts of a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class MadeBy:
    """Numbers of dispatches and copies by artifact, one count for both; shared by the lanes of a worker.

    After a fault an artifact may be made again while the order to drop its first edition still waits in the other
    lane, or its first copy is still on its way: the newer one stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def note(self, artifacts: Iterable[str], number: int) -> None:
        """Dispatch ``number`` is about to make these."""
        with self._lock:
            self._numbers |= dict.fromkeys(artifacts, number)

    def accepts(self, artifact: str, number: int) -> bool:
        """Whether what copy ``number`` has brought is the newest; then it is noted."""
        with self._lock:
            if self._numbers.get(artifact, 0) > number:
                return False
            self._numbers[artifact] = number
            return True

    def forget(self, artifacts: Iterable[str], before: int | None = None) -> tuple[str, ...]:
        """Those that are to be dropped: made not later than ``before``, or all of them."""
        with self._lock:
            old = [name for name in artifacts if before is None or self._numbers.get(name, 0) <= before]
            for name in old:
                self._numbers.pop(name, None)
            return tuple(old)
