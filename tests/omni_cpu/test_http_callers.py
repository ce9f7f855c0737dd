"""What requests are called, by what their clients' headers say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gfdit.observe.metrics import SHOWN, ServerMetrics
from gfdit.observe.tracing import Caller
from gfdit.omni.http_callers import MAX_ID_LENGTH, MAX_STATE_LENGTH, carry_callers, note_caller


class Expected:
    """In place of a server's tracing."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}

    def expect(self, request_id: str, caller: Caller) -> None:
        self.callers[request_id] = caller


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Expected]:
    server, expected = ServerMetrics(1), Expected()
    server.tracing = expected  # type: ignore[assignment]
    monkeypatch.setattr(SHOWN, "server", server)
    yield expected


async def named(client: Any, external: str, *headers: tuple[str, str]) -> str:
    async def request() -> str:
        note_caller([(name.encode(), value.encode("latin-1")) for name, value in headers])
        await asyncio.sleep(0)
        name: str = client.generate(external)
        return name

    return await asyncio.create_task(request())


class Client:
    """As vLLM-Omni's."""

    @staticmethod
    def _get_unique_request_id(external: str) -> str:
        return f"{external}-1a2b3c4d"

    def generate(self, external: str) -> str:
        return self._get_unique_request_id(external)


class StandIn:
    """As vLLM-Omni has for its launcher."""

    def __init__(self, client: Client) -> None:
        self._wrapped = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@pytest.fixture(params=[lambda client: client, StandIn], ids=["itself", "behind a stand-in"])
def client(request: pytest.FixtureRequest) -> Any:
    client = request.param(Client())
    carry_callers(client)
    return client


def test_a_request_is_called_by_its_clients_name_too(client: Any, expected: Expected) -> None:
    async def run() -> list[str]:
        headers = (
            ("X-Request-Id", "order/17\n"),
            ("Traceparent", "00-1"),
            ("tracestate", "a=b"),
            ("tracestate", "c=d"),
        )
        one = named(client, "img_gen-5a", *headers)
        other = named(client, "img_gen-6b")
        return list(await asyncio.gather(one, other))

    one, other = asyncio.run(run())
    assert (one, other) == ("img_gen-5a-order_17-1a2b3c4d", "img_gen-6b-1a2b3c4d")
    assert expected.callers == {one: Caller("order_17", "00-1", "a=b,c=d"), other: Caller()}


def test_a_name_that_has_the_clients_in_it_stays(client: Any, expected: Expected) -> None:
    name = asyncio.run(named(client, "chatcmpl-order-17", ("x-request-id", "order-17")))
    assert name == "chatcmpl-order-17-1a2b3c4d"


def test_what_a_client_says_is_bounded(client: Any, expected: Expected) -> None:
    """Of two traceparents none is the right one."""
    state = "a=" + "b" * MAX_STATE_LENGTH
    headers = ("x-request-id", "ä" * 500), ("tracestate", state), ("traceparent", "1"), ("traceparent", "2")
    name = asyncio.run(named(client, "", *headers))
    assert name == "_" * MAX_ID_LENGTH + "-1a2b3c4d"
    assert expected.callers[name] == Caller("_" * MAX_ID_LENGTH, "", "")


def test_a_client_of_another_making_is_left_alone() -> None:
    client = SimpleNamespace()
    carry_callers(client)
    assert not vars(client)
