"""Replay a trace over HTTP: every request at its arrival time, and what became of it.

The client is open-loop: what is due is sent, however many are still to be answered. So each request has a
connection of its own. A pool of them would be a queue in the client, which takes the longer the more wait in it
(``httpx``'s needs 45 s of CPU for 2000 at once, 2000 connections 3 s), and a connection that was kept may be
closed by the server in the moment it is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gfdit.cli.http_requests import Generation, generation
from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    import httpx

NO_ANSWER = 0
MAX_ERROR_CHARACTERS = 500
LAG_TICK_S = 0.01
POLL_S = 0.1  # of jobs: so late their end may be seen


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replayed request. Times are seconds from the start of the replay.

    ``status`` is the HTTP status, 0 where no answer came; ``error`` is empty on success. ``latency_s`` counts
    from the trace's arrival time, so a client that is late cannot flatter the server. ``queued_s`` was spent
    waiting for one of ``max_concurrency``; all else between arrival and sending is the client's own lateness.
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
    queued_s: float = 0.0

    @property
    def completed(self) -> bool:
        return self.status == HTTPStatus.OK and not self.error

    @property
    def latency_s(self) -> float:
        return self.finish_s - self.arrival_s

    @property
    def lateness_s(self) -> float:
        return self.sent_s - self.arrival_s - self.queued_s

    def met_deadline(self, grace_s: float = 0.0) -> bool:
        """Completed in time; without a deadline, completed."""
        in_time = self.deadline_s is None or self.latency_s <= self.deadline_s + grace_s
        return self.completed and in_time


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``send_slo`` tells the server deadline, class and priority, which only gfdit understands.

    ``input_image`` is a PNG that every request edits, under ``mask_image`` if there is one, or begins its video
    with. ``extra_params`` go with every request: what only the model understands. ``model``, ``endpoint`` and
    ``extra_body`` are those of :func:`~gfdit.cli.http_requests.generation`, ``headers`` go with every request.
    With ``max_concurrency`` so many are at the server at most, others wait here: the loop is closed then.
    """

    base_url: str
    send_slo: bool = False
    request_timeout_s: float = 600.0
    input_image: bytes | None = None
    mask_image: bytes | None = None
    extra_params: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    endpoint: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int | None = None
    keep_images: bool = True


@dataclass
class LoopLag:
    """By how much the client itself was late at most: neither a sending nor an end is off by more."""

    max_s: float = 0.0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        watching = True

        def tick(due_s: float) -> None:
            self.max_s = max(self.max_s, loop.time() - due_s)
            if watching:
                due_s = loop.time() + LAG_TICK_S
                loop.call_at(due_s, tick, due_s)

        tick(loop.time())
        try:
            yield
        finally:
            watching = False


def replay(
    trace: Sequence[TraceRequest],
    options: ReplayOptions,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
    lag: LoopLag | None = None,
) -> list[Outcome]:
    """Send every request when it is due and wait for all answers; ``on_done`` sees each as it comes.

    A server that fails, refuses or disappears makes failed outcomes, not an exception. In the trace's order.
    ``lag`` is told how late the client was. Raises what :func:`~gfdit.cli.http_requests.generation` raises.
    """
    generations = [
        generation(
            request,
            send_slo=options.send_slo,
            input_image=options.input_image,
            mask_image=options.mask_image,
            extra_params=options.extra_params,
            model=options.model,
            endpoint=options.endpoint,
            extra_body=options.extra_body,
        )
        for request in trace
    ]
    return asyncio.run(_replay(trace, generations, options, on_done, lag or LoopLag()))


async def _replay(
    trace: Sequence[TraceRequest],
    generations: Sequence[Generation],
    options: ReplayOptions,
    on_done: Callable[[Outcome], None],
    lag: LoopLag,
) -> list[Outcome]:
    import httpx

    tls = httpx.create_ssl_context(trust_env=False)  # once: it takes 20 ms
    room = (
        contextlib.nullcontext() if options.max_concurrency is None else asyncio.Semaphore(options.max_concurrency)
    )
    start_s = time.monotonic()

    async def one(request: TraceRequest, wanted: Generation) -> Outcome:
        await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
        woke_s = time.monotonic()
        async with room:
            queued_s = time.monotonic() - woke_s
            outcome = await _send(
                httpx.AsyncHTTPTransport(verify=tls), request, wanted, options, start_s, queued_s
            )
        on_done(outcome)
        return outcome

    with lag.watch():
        return await asyncio.gather(*(one(*pair) for pair in zip(trace, generations, strict=True)))


async def _send(
    transport: httpx.AsyncHTTPTransport,
    request: TraceRequest,
    wanted: Generation,
    options: ReplayOptions,
    start_s: float,
    queued_s: float,
) -> Outcome:
    import httpx

    status, error = NO_ANSWER, ""
    sent_s: float | None = None
    image: bytes | None = None

    async def on_event(name: str, info: Mapping[str, Any]) -> None:
        """The first is that the client connects: from then on what takes time is network and server."""
        nonlocal sent_s
        if sent_s is None:
            sent_s = time.monotonic() - start_s

    # No proxy, no retries; the time limit is on the whole, not on each read.
    client = httpx.AsyncClient(
        transport=transport,
        base_url=options.base_url,
        headers=dict(options.headers),
        timeout=None,
        trust_env=False,
    )
    try:
        async with asyncio.timeout(options.request_timeout_s), client:
            response = await client.post(wanted.path, **wanted.arguments, extensions={"trace": on_event})
            status = response.status_code
            if wanted.is_job and status == HTTPStatus.OK:
                response = await _result_of(client, wanted.path, response)
                status = response.status_code
    except TimeoutError:
        status, error = NO_ANSWER, "no answer in time"
    except httpx.HTTPError as failure:
        status, error = NO_ANSWER, f"{type(failure).__name__}: {failure}"
    except (ValueError, KeyError, TypeError):
        error = f"not a job: {response.text[:MAX_ERROR_CHARACTERS]}"
    finish_s = time.monotonic() - start_s
    if status == HTTPStatus.OK and not error:
        try:
            image = wanted.read(response)
        except (ValueError, KeyError, IndexError, TypeError):
            error = f"not an image or video: {response.text[:200]}"
    elif status != NO_ANSWER and not error:
        error = sentence_of(response.text)
    return Outcome(
        request.id,
        request.slo_class,
        request.arrival_s,
        request.deadline_s,
        finish_s if sent_s is None else sent_s,
        finish_s,
        status,
        error,
        image if options.keep_images else None,
        queued_s,
    )


async def _result_of(client: httpx.AsyncClient, path: str, created: httpx.Response) -> httpx.Response:
    """Of a job, once it has ended: its content, or the answer that says why there is none."""
    job = f"{path}/{created.json()['id']}"
    while True:
        answer = await client.get(job)
        if answer.status_code != HTTPStatus.OK:
            return answer
        state = answer.json()["status"]
        if state == "completed":
            return await client.get(f"{job}/content")
        if state in ("failed", "cancelled"):
            answer.status_code = HTTPStatus.INTERNAL_SERVER_ERROR
            return answer
        await asyncio.sleep(POLL_S)


def sentence_of(text: str) -> str:
    """What an error's body says: the message in the JSON of OpenAI's or FastAPI's form, or the text itself."""
    with contextlib.suppress(ValueError, AttributeError):
        body = json.loads(text)
        error = body.get("error") or body.get("detail") or body.get("message")
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str) and message:
            text = message
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]
