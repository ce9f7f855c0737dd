"""What the engine of these tests was told and decided, from its recording, which is written as it decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gfdit.core.commands import RunTask
from gfdit.core.events import RequestArrived, RequestCancelled
from gfdit.core.tasks import TaskKind
from gfdit.observe.recording import RecordingReader, TimedEvent


class Recorded:
    """Everything since it was made. Requests are known by their scripts."""

    def __init__(self, reader: RecordingReader) -> None:
        self._reader = reader
        self._entries: list[object] = []
        self.entries()
        self._entries.clear()

    def entries(self) -> list[object]:
        """Events and commands, in order."""
        self._entries += [e.event if isinstance(e, TimedEvent) else e for e in self._reader.entries()]
        return self._entries

    def requests(self, script: str) -> list[str]:
        """The engine's names of those that arrived."""
        arrived = [entry.request for entry in self.entries() if isinstance(entry, RequestArrived)]
        return [request.id for request in arrived if request.slo_class == script]

    def num_steps(self, script: str) -> int:
        """Denoising steps dispatched."""
        names = self.requests(script)
        tasks = [task for entry in self.entries() if isinstance(entry, RunTask) for task in entry.tasks]
        return sum(task.kind is TaskKind.DENOISE and task.request_id in names for task in tasks)

    def num_tasks_since_cancelled(self, script: str) -> int | None:
        """None if no request was cancelled."""
        names, entries = self.requests(script), self.entries()
        cancelled = [isinstance(entry, RequestCancelled) and entry.request_id in names for entry in entries]
        if True not in cancelled:
            return None
        later = [task for e in entries[cancelled.index(True) :] if isinstance(e, RunTask) for task in e.tasks]
        return sum(task.request_id in names for task in later)


@contextmanager
def recorded_from_now(path: Path) -> Iterator[Recorded]:
    with RecordingReader(path) as reader:
        yield Recorded(reader)
