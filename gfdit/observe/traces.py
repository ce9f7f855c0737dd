"""What a control process tells its engine for traces: what ran, what moved, what went wrong; about once a second.

It knows nothing of traces but the names of requests: which trace a request belongs to is known where its client is
(:mod:`gfdit.observe.tracing`). All times are readings of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import msgspec


class TaskSpan(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True):
    """One task of one request, from when its first rank began until its last was done.

    ``decided_s`` is when it was sent, ``attempt`` how often it has been by then; of a ``batch`` of several each
    has the times of all. ``component`` is what it ran on in a workflow. With ``error`` it came to nothing, and
    began for all that is known when it was sent.
    """

    request: str
    task: str
    kind: str
    component: str
    step: int
    ranks: tuple[int, ...]
    sp: int
    cfg: int
    batch: int
    attempt: int
    run_ahead: bool
    decided_s: float
    start_s: float
    end_s: float
    error: str = ""


class CopySpan(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True):
    """One artifact on its way. ``keep``: a copy to fall back on, for which no task waits."""

    request: str
    artifact: str
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    num_bytes: int
    keep: bool
    start_s: float
    end_s: float
    error: str = ""


class RequestEvent(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True):
    """A moment in the life of a request: ``task_failed``, ``rank_lost`` or ``retry`` (of ``task``)."""

    request: str
    name: str
    at_s: float
    task: str
    rank: int = -1
    detail: str = ""


Fact = TaskSpan | CopySpan | RequestEvent


class Traces(msgspec.Struct, frozen=True, tag=True):
    """Everything since the last one but for ``num_dropped``, which were too many to keep."""

    facts: list[Fact] = []
    num_dropped: int = 0
