"""Replay a trace over HTTP: every request at its arrival time, and what became of it.

A request's prompt and seed follow from its id alone, so two servers given one trace are asked for the same
images.
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    import httpx

IMAGES_PATH = "/v1/images/generations"
GUIDANCE_SCALE = 4.0
NO_ANSWER = 0
_SUBJECTS = ("a red panda", "a lighthouse", "an old tram", "a bowl of cherries", "two foxes", "a glass city")
_STYLES = ("in the rain", "as a watercolour", "at dawn", "in thick fog", "by candlelight", "from above")


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
    image: bytes | None = None

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
    """``send_slo`` tells the server deadline, class and priority, which only gfdit understands."""

    base_url: str
    send_slo: bool = False
    request_timeout_s: float = 600.0


def prompt_of(request_id: str) -> str:
    pick = zlib.crc32(request_id.encode())
    return f"{_SUBJECTS[pick % len(_SUBJECTS)]} {_STYLES[pick // len(_SUBJECTS) % len(_STYLES)]}"


def seed_of(request_id: str) -> int:
    return zlib.crc32(request_id.encode()) & 0x7FFFFFFF


def request_body(request: TraceRequest, *, send_slo: bool) -> dict[str, Any]:
    """The JSON of ``POST /v1/images/generations``."""
    if request.num_frames != 1:
        raise ValueError(f"request {request.id}: only images can be replayed, it has {request.num_frames} frames")
    body: dict[str, Any] = {
        "prompt": prompt_of(request.id),
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.num_steps,
        "seed": seed_of(request.id),
        "response_format": "b64_json",
    }
    if request.cfg:
        body |= {"negative_prompt": "blurry", "true_cfg_scale": GUIDANCE_SCALE}
    if send_slo:
        slo: dict[str, Any] = {"slo_class": request.slo_class, "priority": request.priority}
        if request.deadline_s is not None:
            slo["deadline_ms"] = request.deadline_s * 1e3
        body["extra_params"] = {"gfdit": slo}
    return body


def replay(
    trace: Sequence[TraceRequest],
    options: ReplayOptions,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send every request when it is due and wait for all answers; ``on_done`` sees each as it comes.

    A server that fails, refuses or disappears makes failed outcomes, not an exception. In the trace's order.
    """
    bodies = [request_body(request, send_slo=options.send_slo) for request in trace]
    return asyncio.run(_replay(trace, bodies, options, on_done))


async def _replay(
    trace: Sequence[TraceRequest],
    bodies: Sequence[dict[str, Any]],
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

        async def one(request: TraceRequest, body: dict[str, Any]) -> Outcome:
            await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
            outcome = await _send(client, request, body, start_s)
            on_done(outcome)
            return outcome

        return await asyncio.gather(*(one(*pair) for pair in zip(trace, bodies, strict=True)))


async def _send(client: httpx.AsyncClient, request: TraceRequest, body: dict[str, Any], start_s: float) -> Outcome:
    import httpx

    sent_s = time.monotonic() - start_s
    status, error, image = NO_ANSWER, "", None
    try:
        response = await client.post(IMAGES_PATH, json=body)
        status = response.status_code
    except httpx.TimeoutException:
        error = "no answer in time"
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    finish_s = time.monotonic() - start_s
    if status == HTTPStatus.OK:
        try:
            image = base64.b64decode(response.json()["data"][0]["b64_json"])
        except (ValueError, KeyError, IndexError, TypeError):
            error = f"not an image: {response.text[:200]}"
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
