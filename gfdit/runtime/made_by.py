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
        self._distrusted: set[str] = set()

    def note(self, artifacts: Iterable[str], number: int) -> None:
        """Dispatch ``number`` is about to make these."""
        with self._lock:
            self._numbers |= dict.fromkeys(artifacts, number)
            self._distrusted.difference_update(artifacts)

    def distrust(self, artifacts: Iterable[str]) -> None:
        """The dispatch that was to make these has failed: what is there of them may be anything."""
        with self._lock:
            self._distrusted.update(artifacts)

    def is_sound(self, artifact: str) -> bool:
        with self._lock:
            return artifact not in self._distrusted

    def accepts(self, artifact: str, number: int) -> bool:
        """Whether what copy ``number`` has brought is the newest; then it is noted."""
        with self._lock:
            if self._numbers.get(artifact, 0) > number:
                return False
            self._numbers[artifact] = number
            self._distrusted.discard(artifact)
            return True

    def forget(self, artifacts: Iterable[str], before: int | None = None) -> tuple[str, ...]:
        """Those that are to be dropped: made not later than ``before``, or all of them."""
        with self._lock:
            old = [name for name in artifacts if before is None or self._numbers.get(name, 0) <= before]
            for name in old:
                self._numbers.pop(name, None)
                self._distrusted.discard(name)
            return tuple(old)
