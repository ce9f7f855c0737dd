"""From what the engine and the control process say of requests to spans at a collector."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from gfdit.core import Request, Shape
from gfdit.observe import catalogue as names
from gfdit.observe.metrics import ServerMetrics
from gfdit.observe.otlp import Batch, Endpoint, Exporter
from gfdit.observe.traces import CopySpan, RequestEvent, TaskSpan, Traces
from gfdit.observe.tracing import MAX_BATCH, MAX_WAITING, Caller, Tracing
from tests.support.collector import Collector, grpc_collector, http_collector
from tests.support.waiting import HANG_S, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


class Server:
    """Its metrics and their tracing, as the engine has them."""

    def __init__(self, url: str, open_exporter: Callable[[Endpoint], Exporter] = Exporter.of) -> None:
        self.metrics = ServerMetrics(2)
        self.tracing = Tracing(url, {"service.name": "gfdit"}, self.metrics.count_spans, open_exporter)
        self.metrics.tracing = self.tracing

    def run(
        self, name: str, caller: Caller | None = None, outcome: str = "completed", *facts: TaskSpan
    ) -> Request:
        """A request that comes, runs and ends, and what the control process says of it then."""
        request = Request(name, "m", Shape(64, 96), 4, time.monotonic(), deadline_s=time.monotonic() + HANG_S)
        if caller is not None:
            self.tracing.expect(name, caller)
        self.metrics.arrived(request)
        self.metrics.started(name, 0.25)
        self.metrics.ended(name, outcome)
        self.tracing.take(Traces(list(facts)))
        return request

    def counted(self) -> dict[str, float]:
        values = self.metrics.values()
        return {outcome: values[names.SPANS.name, (outcome,)][0] for outcome in names.SPAN_OUTCOMES}


def step(request: str, number: int, **rest: object) -> TaskSpan:
    now_s = time.monotonic()
    values: dict[str, object] = {
        "request": request,
        "task": f"{request}/denoise/{number}",
        "kind": "denoise",
        "component": "",
        "step": number,
        "ranks": (1, 0),
        "sp": 2,
        "cfg": 1,
        "batch": 1,
        "attempt": 1,
        "run_ahead": False,
        "decided_s": now_s - 2,
        "start_s": now_s - 1.5,
        "end_s": now_s - 1,
        **rest,
    }
    return TaskSpan(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [http_collector, grpc_collector])
def test_a_request_its_tasks_and_its_migrations_are_one_trace(
    kind: Callable[[], AbstractContextManager[Collector]],
) -> None:
    with kind() as collector:
        server = Server(collector.url)
        server.tracing.expect("r1", Caller("mine", TRACEPARENT, "a=b"))
        now_s = time.monotonic()
        request = Request("r1", "m", Shape(64, 96), 4, now_s - 3, cfg=True, deadline_s=now_s + 60, priority=2)
        server.metrics.arrived(request)
        server.metrics.started("r1", 0.25)
        copy = CopySpan("r1", "r1/latents/1", (0,), (1, 2), 4096, False, now_s - 1, now_s - 0.9)
        failed = step("r1", 1, error="rank 1 was lost: killed")
        lost = RequestEvent("r1", "rank_lost", now_s, "r1/denoise/1", 1, "killed")
        server.tracing.take(Traces([step("r1", 0), copy, lost, failed, step("nobody", 1)]))
        assert not collector.named("request")
        server.metrics.ended("r1", "completed")
        server.tracing.take(Traces([step("r1", 1, attempt=2)]))
        server.tracing.close()
    (root,) = collector.named("request")
    assert (root.trace, root.parent, root.state, root.kind) == (TRACE, PARENT, "a=b", 2)
    assert root.attributes == {
        "gfdit.request.id": "r1",
        "gfdit.request.client_id": "mine",
        "gfdit.request.model": "m",
        "gfdit.request.size": "96x64",
        "gfdit.request.frames": 1,
        "gfdit.request.outputs": 1,
        "gfdit.request.steps": 4,
        "gfdit.request.guidance": True,
        "gfdit.request.priority": 2,
        "gfdit.request.slo_class": "default",
        "gfdit.request.deadline_s": pytest.approx(63),
        "gfdit.request.outcome": "completed",
        "gfdit.request.met": True,
        "gfdit.request.queue_wait_s": 0.25,
    }
    at_task = {"gfdit.task.id": "r1/denoise/1"}
    assert root.events == [("rank_lost", at_task | {"gfdit.rank": 1, "gfdit.error": "killed"})]
    assert root.resource["service.name"] == "gfdit" and not root.is_error
    assert abs(root.start_ns - (time.time_ns() - 3e9)) < HANG_S * 1e9 and root.end_ns > root.start_ns + 3e9 - 1e7

    first, bad, again = collector.named("denoise")
    assert {(one.trace, one.parent, one.kind) for one in (first, bad, again)} == {(TRACE, root.id, 1)}
    assert (bad.error, bad.is_error) == ("rank 1 was lost: killed", True)
    assert again.attributes["gfdit.task.attempt"] == 2
    assert first.attributes["gfdit.task.ranks"] == [1, 0] and first.attributes["gfdit.task.degree"] == 2
    assert first.attributes["gfdit.task.wait_s"] == pytest.approx(0.5)
    (move,) = collector.named("migrate")
    assert move.attributes["gfdit.migration.to"] == [1, 2] and move.attributes["gfdit.migration.bytes"] == 4096
    assert len({span.id for span in collector.spans}) == len(collector.spans) == 5
    assert server.counted() == {"exported": 5, "dropped": 0}


def test_clients_without_a_trace_that_is_valid_get_one_of_their_own(collector: Collector) -> None:
    bad = ["", "x", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
    bad += [f"{TRACEPARENT}-more", TRACEPARENT.upper()]
    server = Server(collector.url)
    for number, traceparent in enumerate(bad):
        server.run(f"r{number}", Caller("", traceparent, "a=b"))
    server.run("later", Caller("", f"01{TRACEPARENT[2:]}-more"))
    server.tracing.close()
    roots = collector.named("request")
    assert [(one.parent, one.state) for one in roots[:-1]] == [("", "")] * len(bad)
    assert len({one.trace for one in roots}) == len(bad) + 1
    assert (roots[-1].trace, roots[-1].parent) == (TRACE, PARENT)


def test_a_client_that_does_not_sample_is_left_alone(collector: Collector) -> None:
    server = Server(collector.url)
    server.run("quiet", Caller("", f"00-{TRACE}-{PARENT}-00"), "completed", step("quiet", 0))
    server.run("loud", Caller("", TRACEPARENT))
    server.tracing.close()
    assert [one.attributes["gfdit.request.id"] for one in collector.spans] == ["loud"]


def test_what_runs_on_after_its_client_has_gone_is_in_the_trace(collector: Collector) -> None:
    """The control process hears later that it was cancelled, and the step that ran ends later still."""
    server = Server(collector.url)
    server.run("r1", None, "cancelled")
    wait_until(lambda: collector.named("request"), "the request's span")
    server.tracing.take(Traces([step("r1", 3)]))
    server.tracing.close()
    (root,), (last,) = collector.named("request"), collector.named("denoise")
    assert (last.trace, last.parent) == (root.trace, root.id)
    assert "gfdit.request.met" not in root.attributes


def test_a_collector_that_is_away_costs_its_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gfdit.tracing")
    with http_collector() as collector:
        collector.answer = 503
        server = Server(collector.url)
        server.run("r1")
        wait_until(lambda: server.counted()["dropped"] == 1, "it was tried")
        server.run("r2")
        wait_until(lambda: server.counted()["dropped"] == 2, "it was tried again")
        collector.answer = 200
        server.run("r3")
        server.tracing.close()
    assert [one.attributes["gfdit.request.id"] for one in collector.spans] == ["r3"]
    assert server.counted() == {"exported": 1, "dropped": 2}
    first, again = caplog.messages
    assert first.startswith(f"spans cannot be sent to {collector.url} and are dropped: HTTP Error 503")
    assert again == f"spans are sent to {collector.url} again"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1/traces", "grpc://127.0.0.1:1"])
def test_no_collector_at_all_is_said_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(url)
    server.run("r1")
    server.tracing.close()
    (message,) = caplog.messages
    assert message.startswith(f"spans cannot be sent to {url} and are dropped: ")
    assert server.counted() == {"exported": 0, "dropped": 1}


def test_a_collector_that_hangs_keeps_nobody_waiting_and_memory_bounded(caplog: pytest.LogCaptureFixture) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    sent: Counter[str] = Counter()

    def send(batch: Batch) -> None:
        hangs.set()
        assert goes_on.wait(HANG_S)
        sent["spans"] += len(batch)

    server = Server("http://127.0.0.1:1/v1/traces", lambda _: Exporter(send, lambda: None))
    server.run("first")
    assert hangs.wait(HANG_S)
    many = [step("r1", number) for number in range(MAX_WAITING // 8)]
    server.run("r1")
    for _ in range(12):
        server.tracing.take(Traces(list(many)))
    dropped = server.counted()["dropped"]
    assert 3 * len(many) <= dropped <= 5 * len(many)
    goes_on.set()
    server.tracing.close()
    assert server.counted() == {"exported": sent["spans"], "dropped": dropped} and sent["spans"] > 2 * MAX_BATCH
    assert caplog.messages[0].endswith("the collector is too slow, entries are left out; serving goes on")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://h:4318/v1/traces", Endpoint(url="http://h:4318/v1/traces")),
        ("https://h:4318/v1/traces", Endpoint(url="https://h:4318/v1/traces", is_secure=True)),
        ("http://h:4317", Endpoint(target="h:4317")),
        ("https://h:4317/", Endpoint(target="h:4317", is_secure=True)),
        ("grpc://h:4317", Endpoint(target="h:4317")),
        ("grpcs://[::1]:4317", Endpoint(target="[::1]:4317", is_secure=True)),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint


@pytest.mark.parametrize(
    "text", ["", "localhost:4317", "http://h", "ftp://h:1/x", "grpc://h:4317/v1", "http://h:x/"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:4318/v1/traces or grpc://HOST:4317"):
        Endpoint.parse(text)
