"""Clients of a simulated server, the real HTTP front between them and the engine, and an event loop for both.

What vLLM-Omni's endpoints do in between is told in :class:`Endpoints`: as much as the front has to do with.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import signal
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gfdit.core import Request, TaskGraph
from gfdit.core import commands as cmd
from gfdit.omni.http_front import HttpFront, Message
from gfdit.omni.retryable import retryable
from gfdit.runtime import messages as msg
from tests.whole.books import ContractError
from tests.whole.strands import Scheduler, Strand

if TYPE_CHECKING:
    from tests.whole.world import World

OVERDUE_S = 10.0
"""Within which a server that stops has answered everybody, after the time that requests have to end."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in a strand: what it waits for is the virtual clock, and other strands."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._selector_of_strands = _Selector(scheduler)
        self.on_signal: dict[int, Callable[[], object]] = {}
        super().__init__(self._selector_of_strands)

    def time(self) -> float:
        return self._scheduler.time_s

    def _write_to_self(self) -> None:
        self._selector_of_strands.wake()

    def add_signal_handler(self, sig: int, callback: Callable[[Any], object], *args: Any) -> None:  # type: ignore[override]
        self.on_signal[sig] = partial(callback, *args)


class _Selector(selectors.SelectSelector):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._strand: Strand | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._scheduler.closing and (timeout is None or timeout > 0):
            self._strand = self._scheduler.current
            self._scheduler.wait(timeout)
            self._strand = None
        return []

    def wake(self) -> None:
        if self._strand is not None:
            self._strand.wake()


class Client:
    """One request of one client, who may go away."""

    def __init__(self, name: str, manner: str, sent_s: float) -> None:
        self.name = name
        self.manner = manner
        self.sent_s = sent_s
        self.status: int | None = None
        self.retry_after = False
        self.is_whole = False  # the answer
        self.has_gone = asyncio.Event()
        self._is_read = False

    async def receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self.name.encode(), "more_body": False}
        await self.has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.status is not None:
                raise ContractError(f"{self.name} is answered twice")
            self.status = message["status"]
            self.retry_after = any(name == b"retry-after" for name, _ in message["headers"])
        else:
            if self.status is None or self.is_whole:
                raise ContractError(f"{self.name} is sent a body before its answer, or after")
            self.is_whole = not message.get("more_body", False)


class Endpoints:
    """The application behind the front: hands requests to the engine and waits for their ends."""

    def __init__(self, world: World, shutdown_timeout_s: float) -> None:
        self.server = SimpleNamespace(config=SimpleNamespace(timeout_graceful_shutdown=None), should_exit=False)
        self.state = SimpleNamespace(server=self.server, engine_client=self)
        self.routes: list[Any] = []  # no endpoint of edits
        self.is_down = False
        self._world = world
        self._settings = {"gfdit": {"shutdown_timeout_s": shutdown_timeout_s}}
        self._waiting: dict[str, asyncio.Future[tuple[int, str]]] = {}

    # As the front has the engine

    async def check_health(self) -> None:
        if self.is_down:
            raise RuntimeError("the engine is dead")

    def get_diffusion_od_config(self) -> Any:
        return SimpleNamespace(additional_config=self._settings)

    def generate(self, *_: Any, **__: Any) -> Any:
        """Requests go to the engine by another way here."""
        raise NotImplementedError

    # As the server has the application

    def include_router(self, router: Any) -> None:
        """Nobody asks for the routes of operators."""

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
        elif scope["path"] == "/health":
            await _respond(send, HTTPStatus.SERVICE_UNAVAILABLE if self.is_down else HTTPStatus.OK)
        else:
            await self._post(scope["arrival"], scope["manner"], receive, send)

    async def _post(self, arrival: tuple[Request, TaskGraph], manner: str, receive: Any, send: Any) -> None:
        name = (await receive())["body"].decode()
        if self.is_down:
            await _respond(send, HTTPStatus.INTERNAL_SERVER_ERROR, "EngineDeadError")
            return
        if self._world.entrance.stopping_s is not None:
            self._world.accuse(f"{name} comes to a server that stops")
        waiting = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._world.submit(*arrival)
        if manner == "stream":  # the answer begins before it is known
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
        gone = None if manner == "deaf" else asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([waiting] if gone is None else [waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if gone is not None:
                gone.cancel()
            if not waiting.done():
                del self._waiting[name]
                self._world.give_up(name)
        status, text = waiting.result() if waiting.done() else (HTTPStatus.OK, "null")
        if manner == "stream":
            await send({"type": "http.response.body", "body": text.encode()})
        else:
            await _respond(send, status, text)

    # As the engine has it: from any strand

    def end(self, loop: VirtualLoop, name: str, ending: msg.RequestEnd | None) -> None:
        """None: its result is lost. As vLLM-Omni, which keeps the status only where it blames the client."""
        match ending:
            case None:
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, retryable("the result was lost")
            case cmd.FailRequest(_, error, 503):
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, retryable(error)
            case cmd.FailRequest(_, error, HTTPStatus.BAD_REQUEST):
                answer = HTTPStatus.BAD_REQUEST, error
            case cmd.FailRequest(_, error):
                answer = HTTPStatus.INTERNAL_SERVER_ERROR, error
            case cmd.RejectRequest(_, reason, retry_after_s):
                answer = (
                    HTTPStatus.TOO_MANY_REQUESTS,
                    reason if retry_after_s is None else f"{reason} (retry after {round(retry_after_s)} s)",
                )
            case _:
                answer = HTTPStatus.OK, "an image"
        loop.call_soon_threadsafe(self._end, name, answer)

    def go_down(self, loop: VirtualLoop, error: str) -> None:
        """Whoever waits is told."""
        self.is_down = True
        for name in self._waiting:
            loop.call_soon_threadsafe(self._end, name, (HTTPStatus.INTERNAL_SERVER_ERROR, retryable(error)))

    def _end(self, name: str, answer: tuple[int, str]) -> None:
        if (waiting := self._waiting.pop(name, None)) is not None:
            waiting.set_result(answer)


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Any, status: int, text: str = "") -> None:
    body = text if status == HTTPStatus.OK else json.dumps({"error": {"message": text}})
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})


class Entrance:
    """The front, who comes to it, and what each of them must be answered."""

    def __init__(self, world: World) -> None:
        draw = world.draw
        self.grace_s = draw.choice([0.0, 5.0, 60.0])
        self.endpoints = Endpoints(world, self.grace_s)
        self.clients: dict[str, Client] = {}
        self.num_open = 0
        self.stopping_s: float | None = None
        self._is_impatient = False  # whoever stops it
        self.closed_s: float | None = None
        self._world = world
        self.loop = VirtualLoop(world.scheduler)
        self._front = HttpFront(self.endpoints)

    # Strands

    def serve(self) -> None:
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        scope = {"type": "lifespan", "app": self.endpoints}
        await self._front(scope, asyncio.Event().wait, _take)  # type: ignore[arg-type]
        while True:  # until the world ends
            await asyncio.sleep(1.0)
            if self.closed_s is None and self.endpoints.server.should_exit:
                self.closed_s = self.loop.time()

    def close(self) -> None:
        """Once no strand runs any more: who is still there is sent away."""
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    # From any strand

    def arrive(self, request: Request, graph: TaskGraph) -> None:
        self.num_open += 1
        self.loop.call_soon_threadsafe(self._open, request.id, (request, graph))

    def leave(self, name: str) -> None:
        """A client goes away."""
        if (client := self.clients.get(name)) is not None:
            self.loop.call_soon_threadsafe(client.has_gone.set)

    def terminate(self) -> None:
        """SIGTERM; a second one has no patience."""
        self._is_impatient = self.stopping_s is not None
        if self.stopping_s is None:
            self.stopping_s = self._world.scheduler.time_s
        self.loop.call_soon_threadsafe(self.loop.on_signal[signal.SIGTERM])

    def end(self, name: str, ending: msg.RequestEnd | None) -> None:
        self.endpoints.end(self.loop, name, ending)

    def go_down(self, error: str) -> None:
        self.endpoints.go_down(self.loop, error)

    # One exchange

    def _open(self, name: str, arrival: tuple[Request, TaskGraph]) -> None:
        manner = self._world.draw.choice(["plain", "plain", "plain", "stream", "deaf"])
        self.clients[name] = client = Client(name, manner, self.loop.time())
        task = self.loop.create_task(self._exchange(client, arrival))
        task.add_done_callback(partial(self._close, client))

    async def _exchange(self, client: Client, arrival: tuple[Request, TaskGraph]) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/images/generations",
            "app": self.endpoints,
            "headers": (),
        }
        await self._front({**scope, "arrival": arrival, "manner": client.manner}, client.receive, client.send)

    def _close(self, client: Client, task: asyncio.Task[None]) -> None:
        self.num_open -= 1
        try:
            self._check_answer(client, task)
        except ContractError as error:
            self._world.note_wrong(error)

    def _check_answer(self, client: Client, task: asyncio.Task[None]) -> None:
        name, status, stopping_s = client.name, client.status, self.stopping_s
        if not task.cancelled() and (error := task.exception()) is not None:
            raise ContractError(f"what answers {name} raises {error!r}") from error
        if client.has_gone.is_set():
            return
        ending = self._world.endings_by_name.get(name)
        if stopping_s is not None:
            since_s = self.loop.time() - stopping_s
            if since_s > self.grace_s + OVERDUE_S and client.sent_s < stopping_s:
                raise ContractError(f"{name} is answered {since_s:.0f} s after the server was to stop")
            is_cut = ending is None and client.sent_s < stopping_s and not self.endpoints.is_down
            if is_cut and since_s < self.grace_s - 0.01 and not self._is_impatient:
                raise ContractError(f"{name} is given up before its time, {since_s:.0f} s after the signal")
            if task.cancelled() and client.manner == "stream":
                return  # its answer had begun
        if not client.is_whole:
            raise ContractError(f"{name} is not answered")
        has_begun = client.manner == "stream" and status == HTTPStatus.OK
        expected = HTTPStatus.OK if has_begun else self._expected(name, ending)
        if status != expected and not (stopping_s is not None and status == HTTPStatus.SERVICE_UNAVAILABLE):
            raise ContractError(f"{name} is answered {status}, not {expected}: {ending}")
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS) and not client.retry_after:
            raise ContractError(f"{name} is not told when to try again")

    def _expected(self, name: str, ending: msg.RequestEnd | None) -> int:
        match ending:
            case cmd.CompleteRequest() if name not in self._world.without_result:
                return HTTPStatus.OK
            case cmd.RejectRequest():
                return HTTPStatus.TOO_MANY_REQUESTS
            case cmd.FailRequest(_, _, 400 | 500 as status_code):
                return status_code
            case _:
                return HTTPStatus.SERVICE_UNAVAILABLE

    def check(self) -> None:
        """At the end: nobody waits, and a server that was told to stop has stopped in time."""
        if self.num_open:
            raise ContractError(f"{self.num_open} clients wait for ever")
        if self.stopping_s is not None:
            if self.closed_s is None:
                raise ContractError("the server was told to stop and has not")
            if self.closed_s - self.stopping_s > self.grace_s + OVERDUE_S:
                raise ContractError(f"the server took {self.closed_s - self.stopping_s:.0f} s to stop")


async def _take(message: Message) -> None:
    pass
