"""Replay a trace over HTTP: every request at its arrival time, and what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gfdit.cli.http_requests import Generation, generation
from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    import httpx

NO_ANSWER = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replayed request. Times are seconds from the start of the replay.

    ``status`` is the HTTP status, 0 where no answer came; ``error`` is empty on success. ``latency_s`` counts
    from the trace's arrival time, so a client that is late cannot flatter the server.
    """

    id: str
    slo_class: str
    arrival_s: float
    deadline_s: float | None
    sent_s: float
    finish_s: float
    status: int
    error: str = ""
    image: bytes | None = None  # PNG, or the MP4 of a video

    @property
    def completed(self) -> bool:
        return self.status == HTTPStatus.OK and not self.error

    @property
    def latency_s(self) -> float:
        return self.finish_s - self.arrival_s

    def met_deadline(self, grace_s: float = 0.0) -> bool:
        """Completed in time; without a deadline, completed."""
        in_time = self.deadline_s is None or self.latency_s <= self.deadline_s + grace_s
        return self.completed and in_time


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``send_slo`` tells the server deadline, class and priority, which only gfdit understands.

    ``input_image`` is a PNG that every request edits, under ``mask_image`` if there is one, or begins its video
    with. ``extra_params`` go with every request: what only the model understands.
    """

    base_url: str
    send_slo: bool = False
    request_timeout_s: float = 600.0
    input_image: bytes | None = None
    mask_image: bytes | None = None
    extra_params: Mapping[str, Any] = field(default_factory=dict)


def replay(
    trace: Sequence[TraceRequest],
    options: ReplayOptions,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send every request when it is due and wait for all answers; ``on_done`` sees each as it comes.

    A server that fails, refuses or disappears makes failed outcomes, not an exception. In the trace's order.
    """
    generations = [
        generation(
            request,
            send_slo=options.send_slo,
            input_image=options.input_image,
            mask_image=options.mask_image,
            extra_params=options.extra_params,
        )
        for request in trace
    ]
    return asyncio.run(_replay(trace, generations, options, on_done))


async def _replay(
    trace: Sequence[TraceRequest],
    generations: Sequence[Generation],
    options: ReplayOptions,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    import httpx

    # No limit on connections: a queue in the client would hide the server's. No proxy, no retries.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.base_url, timeout=options.request_timeout_s, limits=limits, trust_env=False
    ) as client:
        start_s = time.monotonic()

        async def one(request: TraceRequest, wanted: Generation) -> Outcome:
            await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
            outcome = await _send(client, request, wanted, start_s)
            on_done(outcome)
            return outcome

        return await asyncio.gather(*(one(*pair) for pair in zip(trace, generations, strict=True)))


async def _send(client: httpx.AsyncClient, request: TraceRequest, wanted: Generation, start_s: float) -> Outcome:
    import httpx

    sent_s = time.monotonic() - start_s
    status, error, image = NO_ANSWER, "", None
    try:
        response = await client.post(wanted.path, **wanted.arguments)
        status = response.status_code
    except httpx.TimeoutException:
        error = "no answer in time"
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    finish_s = time.monotonic() - start_s
    if status == HTTPStatus.OK:
        try:
            image = wanted.read(response)
        except (ValueError, KeyError, IndexError, TypeError):
            error = f"not an image or video: {response.text[:200]}"
    elif status != NO_ANSWER:
        error = response.text[:500]
    return Outcome(
        request.id,
        request.slo_class,
        request.arrival_s,
        request.deadline_s,
        sent_s,
        finish_s,
        status,
        error,
        image,
    )
