"""What the kit and its processes tell each other; without vLLM-Omni, which the kit's own process lacks."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.adapters.testing.outputs import Output
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.tasks import TaskGraph
from gfdit.core.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Loaded:
    """What only a loaded model knows, and its candidates depend on."""

    sequence_parallel: bool
    tiling: Tiling | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the engine hands it on: ``payload`` to the ranks, ``graph`` to the control plane."""

    payload: bytes
    graph: TaskGraph


@dataclass(frozen=True, slots=True)
class How:
    """``fresh``: tasks find the pipeline as it was loaded. ``audit``: they run twice, and are watched.

    ``waits``: whatever would make the host wait for a device in a denoising step is a fault.
    """

    fresh: bool = False
    audit: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class TaskRun:
    """What one rank has to say about a dispatch.

    ``outputs`` by request id, on the first rank of the layout, from tasks that end a request; ``views`` of what is
    not like a task's input. ``num_forwards`` counts calls of the transformer, ``split_reasons`` say why steps did
    not share them, ``faults`` are what an audit found.
    """

    outputs: dict[str, Output]
    views: tuple[tuple[str, ArtifactView], ...]
    num_forwards: int
    split_reasons: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
