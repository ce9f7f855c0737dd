"""What a server was asked for, by its own recording (``gfdit serve --record``), as a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gfdit.core import events as ev
from gfdit.core.tasks import Request
from gfdit.observe.recording import RecordingReader
from gfdit.sim.trace import TraceRequest, check_request

MAX_OUTPUTS = 1000
"""Of one request; no server takes so many."""


def recorded_trace(path: str | Path) -> tuple[list[TraceRequest], int]:
    """All requests that arrived, in order, the first at 0 s, and how many of them are edits under a mask.

    A recording does not say which image an edit is of: it becomes one that computes all. A request for several
    images is as many requests, at the same time. What clients withdrew is there as well. Raises ``ValueError`` for
    a file that is not a recording, and for one without requests.
    """
    requests: dict[tuple[str, float], Request] = {}
    with RecordingReader(path) as recording:
        for step in recording.steps():
            if not any(line.startswith(b'{"refused"') for line in step.answer):
                for one in _arrived(step.given.event):
                    if one.shape.num_outputs > MAX_OUTPUTS:
                        raise ValueError(
                            f"{path}, line {step.line_number}: request {one.id!r} is for {one.shape.num_outputs} "
                            f"images, at most {MAX_OUTPUTS} can be"
                        )
                    requests[one.id, one.arrival_s] = one
    if not requests:
        raise ValueError(f"{path}: the recording has no requests")
    in_order = sorted(requests.values(), key=lambda request: request.arrival_s)
    times_asked = Counter(request.id for request in in_order)
    lines = [
        line
        for number, request in enumerate(in_order)
        for line in _lines(
            request,
            request.id if times_asked[request.id] == 1 else f"{request.id}@{number}",
            in_order[0].arrival_s,
        )
    ]
    for line in lines:
        check_request(line, f"{path}: request {line.id!r}")
    return lines, sum(request.shape.computed_percent < 100 for request in in_order)


def _arrived(event: ev.Event) -> Iterator[Request]:
    """A control plane that replaces another one is told of those that are alive."""
    if isinstance(event, ev.RequestArrived):
        yield event.request
    elif isinstance(event, ev.Reconnected):
        yield from (request for request, _ in event.requests)


def _lines(request: Request, name: str, start_s: float) -> Iterator[TraceRequest]:
    shape = request.shape
    for index in range(shape.num_outputs):
        yield TraceRequest(
            id=f"{name}.{index}" if shape.num_outputs > 1 else name,
            arrival_s=round(request.arrival_s - start_s, 6),
            model=request.model,
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            num_steps=request.num_steps,
            cfg=request.cfg,
            slo_class=request.slo_class,
            deadline_s=None if request.deadline_s is None else round(request.deadline_s - request.arrival_s, 6),
            priority=request.priority,
        )
