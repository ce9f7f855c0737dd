"""What a worker process runs tasks on. The vLLM-Omni implementation is :mod:`gfdit.omni.executor`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task
from gfdit.migration.parts import ArtifactParts
from gfdit.runtime.messages import Holding

if TYPE_CHECKING:
    from gfdit.runtime.streams import Streams

Results = Callable[[], dict[str, bytes]]
"""Called on any thread once the device is done: results by request id, from the task that makes no artifact."""


class TaskExecutor(Protocol):
    """Lives in one worker process.

    ``execute`` and ``call`` run on the compute thread; the artifact methods on the migration thread, at the
    same time as a task of *another* request may run. ``free`` may be called from any thread.
    """

    device: torch.device
    #: What is read while it is made; the lanes set it.
    streams: Streams

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        """Launch one dispatch and keep its artifacts, without waiting for the device where it works by itself."""
        ...

    def output_views(self, tasks: tuple[Task, ...]) -> tuple[tuple[str, ArtifactView], ...]:
        """What the artifacts consist of that ``tasks``, just run, have made; none of what is like a task's input
        of the same kind. On the compute thread, before inputs are freed.
        """
        ...

    def memory_use(self) -> MemoryUse | None:
        """What the task launched last took, None where that is not measured. On the compute thread."""
        ...

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        """What was measured so far of what ran for no request. On the compute thread."""
        ...

    def reclaim(self) -> None:
        """A task has run out of memory, and nothing refers to what it made: have the device's memory back."""
        ...

    def export_artifact(self, artifact: str) -> ArtifactParts:
        """What this rank holds of it, with the layout it was made under, or that of ``import_artifact``.

        Its tensors must not change while it is sent. Raises ``KeyError`` for what is not here.
        """
        ...

    def import_artifact(self, artifact: str, parts: ArtifactParts, view: ArtifactView) -> None:
        """Take the place of what this rank held of it, if anything."""
        ...

    def free(self, artifacts: tuple[str, ...]) -> None:
        """Drop artifacts; an unknown one is no error."""
        ...

    def holdings(self) -> tuple[Holding, ...]:
        """Everything it holds, for a control process that does not know."""
        ...

    def probe(self) -> None:
        """Raise unless this rank can still do its work; called after a task of it has failed."""
        ...

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        """Drop ``evict`` and load ``name``; returns its bytes. On the compute thread.

        Whatever it raises, what was to be dropped is gone.
        """
        ...

    def resident(self) -> tuple[str, ...]:
        """The components that are loaded. On the compute thread."""
        ...

    def call(self, method: str, payload: bytes) -> bytes:
        """Run a named method with pickled (args, kwargs); returns the pickled value."""
        ...

    def close(self) -> None: ...


class TaskError(Exception):
    """A task failed because of its request; ``status_code`` is what the client gets.

    ``culprit``: the rank that is suspected if it is another one, which could not send what the task reads.
    """

    def __init__(self, message: str, status_code: int = 500, culprit: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.culprit = culprit


class PeerError(TaskError):
    """A task failed since a peer did; it may run again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status_code=503)


_OF_HOST = "can't allocate memory"  # what torch's allocator of host memory says


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what ``error``, or what it was raised from, says."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _OF_HOST in str(error):
            return True
        error = error.__cause__
    return False


def forget_frames(error: BaseException | None) -> None:
    """Drop what the traceback of ``error`` and of those before it keep alive: every tensor of what failed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
