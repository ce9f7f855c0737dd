"""Forwards that are suspended on this rank: a cache of what their artifacts can make again."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from typing import Any

from gfdit.adapters.forward.run import Run


class Held(dict[str, Any]):
    """An artifact on the rank that made it, where its forward may go on. Copies are plain dictionaries."""

    __slots__ = ("__weakref__",)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Suspended:
    """Runs by the artifact that they stopped at, the least recently used ended where they hold too much.

    A run whose artifact is gone has ended or failed elsewhere, and is ended by the next call from the thread that
    runs tasks: its pipeline is in nobody's hands then.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._runs: OrderedDict[int, tuple[weakref.ref[Held], Run, int]] = OrderedDict()
        self._gone: deque[int] = deque()

    def keep(self, artifact: Held, run: Run) -> None:
        """``run`` may go on from ``artifact``."""
        self.end_those_gone()
        key = id(artifact)
        self._runs[key] = (weakref.ref(artifact, lambda _: self._gone.append(key)), run, run.num_bytes)
        while self._runs and self.num_bytes() > self.limit_bytes:
            _, (_, oldest, _) = self._runs.popitem(last=False)
            oldest.end()

    def at(self, artifact: Any) -> Run | None:
        """The run that stopped at ``artifact``."""
        reference, run, _ = self._runs.get(id(artifact), (None, None, 0))
        return run if reference is not None and reference() is artifact else None

    def take(self, artifact: Any) -> Run | None:
        """The run that stopped at ``artifact``, which is the caller's from now on."""
        self.end_those_gone()
        if (run := self.at(artifact)) is not None:
            del self._runs[id(artifact)]
        return run

    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def end_those_gone(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            if key in self._runs and self._runs[key][0]() is None:  # else its number is another artifact's by now
                self._runs.pop(key)[1].end()
