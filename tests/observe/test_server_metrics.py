"""What a server shows of its requests and its runtime, without any of its processes."""

from __future__ import annotations

import shutil
import subprocess
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gfdit.core import Request, Shape
from gfdit.observe import catalogue as names
from gfdit.observe.metrics import ServerMetrics, Shown
from gfdit.observe.snapshot import RankNumbers, RequestState, Series, Service, Snapshot


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str, slo_class: str = "default", deadline_s: float | None = None) -> Request:
    return Request(name, "m", Shape(64, 64), 4, 100.0, deadline_s=deadline_s, slo_class=slo_class)


def row(
    name: str, slo_class: str = "default", deadline_s: float | None = None, left_s: float = 4.0
) -> RequestState:
    return RequestState(name, "m", slo_class, "running", "denoise", (0, 1), 1, 4, deadline_s, left_s, 2 * left_s)


def snapshot(
    *requests: RequestState, up: tuple[bool, ...] = (True, True), epoch: int = 0, **rest: Any
) -> Snapshot:
    ranks = [RankNumbers(each, False, False, 1, 2.5, 0.5, 7, 0) for each in up]
    return Snapshot(epoch, 99.0, ranks, requests=list(requests), **rest)


def scrape(server: ServerMetrics | Shown) -> dict[tuple[str, tuple[str, ...]], float]:
    """As Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(server)
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    order = [*dict.fromkeys([label for metric in names.METRICS for label in metric.labels]), "le"]
    return {
        (one.name, tuple([one.labels[label] for label in order if label in one.labels])): one.value
        for one in samples
    }


def test_every_family_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    registry.register(Shown())
    text = generate_latest(registry).decode()
    for metric in names.METRICS:
        assert f"# TYPE {metric.name} {metric.kind}" in text


def test_before_the_first_request_counters_are_zero() -> None:
    server = ServerMetrics(2)
    server.take(snapshot())
    shown = scrape(server)
    for key in (
        ("gfdit_requests_total", ("default", "completed")),
        ("gfdit_requests_rejected_total", ("admission",)),
        ("gfdit_deadlines_missed_total", ("default",)),
        ("gfdit_queue_wait_seconds_count", ("default",)),
        ("gfdit_requests_alive", ("default",)),
        ("gfdit_control_restarts_total", ()),
    ):
        assert shown[key] == 0.0, key
    assert shown["gfdit_ready", ()] == 1.0
    assert shown["gfdit_rank_up", ("1",)] == 1.0 and shown["gfdit_rank_restarts_total", ("0",)] == 1.0


def test_how_requests_end() -> None:
    clock = Clock()
    server = ServerMetrics(2, clock=clock)
    server.arrived(request("in time", "fast", deadline_s=110.0))
    server.arrived(request("late", "fast", deadline_s=103.0))
    server.arrived(request("turned away", "fast", deadline_s=103.0))
    server.arrived(request("left", "fast", deadline_s=103.0))
    server.arrived(request("failed"))
    server.started("in time", 0.2)
    server.started("in time", 9.0)  # after it has missed a cache
    assert scrape(server)["gfdit_requests_alive", ("fast",)] == 4 and server.num_running == 1
    clock.now_s = 105.0
    server.ended("turned away", "rejected", "admission")
    server.ended("turned away", "failed")
    for name, outcome in (
        ("in time", "completed"),
        ("late", "completed"),
        ("left", "cancelled"),
        ("failed", "failed"),
    ):
        server.ended(name, outcome)
    server.refused("too_many_requests")
    shown = scrape(server)
    assert (
        shown["gfdit_deadlines_met_total", ("fast",)] == 1
        and shown["gfdit_deadlines_missed_total", ("fast",)] == 2
    )
    assert shown["gfdit_requests_total", ("fast", "completed")] == 2
    assert shown["gfdit_requests_total", ("fast", "rejected")] == 1
    assert shown["gfdit_requests_total", ("default", "failed")] == 1
    assert shown["gfdit_requests_rejected_total", ("admission",)] == 1
    assert shown["gfdit_requests_rejected_total", ("too_many_requests",)] == 1
    assert shown["gfdit_request_seconds_sum", ("fast",)] == 10.0
    assert shown["gfdit_request_seconds_bucket", ("fast", "5.0")] == 2
    assert shown["gfdit_queue_wait_seconds_count", ("fast",)] == 1
    assert shown["gfdit_requests_alive", ("fast",)] == shown["gfdit_requests_queued", ("fast",)] == 0


def test_counts_are_right_while_many_threads_count_and_scrape() -> None:
    server = ServerMetrics(2)

    def serve(number: int) -> None:
        for index in range(200):
            name = f"{number}/{index}"
            server.arrived(request(name, f"class {number % 3}"))
            server.started(name, 0.0)
            if index % 50 == 0:
                scrape(server)
            server.ended(name, "completed")

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = scrape(server)
    for number in range(3):
        assert shown["gfdit_requests_total", (f"class {number}", "completed")] == 400
        assert shown["gfdit_request_seconds_count", (f"class {number}",)] == 400
        assert shown["gfdit_requests_alive", (f"class {number}",)] == 0


def test_clients_cannot_make_more_and_more_series() -> None:
    server = ServerMetrics(2)
    few = len(scrape(server))
    for number in range(500):
        server.arrived(request(f"r{number}", f"class {number}" + "x" * number))
        server.ended(f"r{number}", "completed")
    server.take(snapshot(*[row(f"r{number}", f"other class {number}") for number in range(50)]))
    shown = scrape(server)
    classes = {key[1][0] for key in shown if key[0] == "gfdit_requests_alive"}
    assert len(classes) <= names.MAX_CLASSES + 1 and names.OTHER in classes
    assert max(map(len, classes)) <= names.MAX_CLASS_LENGTH
    assert len(shown) < few * (names.MAX_CLASSES + 3)
    assert sum([value for key, value in shown.items() if key[0] == "gfdit_requests_total"]) == 500


def test_a_control_process_that_is_replaced_takes_no_counter_back() -> None:
    server = ServerMetrics(2)
    tasks = [Series(names.RETRIES.name, (), [3.0])]
    server.take(snapshot(sums=tasks))
    server.take(snapshot(sums=[Series(names.RETRIES.name, (), [1.0])], epoch=1))
    shown = scrape(server)
    assert shown["gfdit_task_retries_total", ()] == 4.0 and shown["gfdit_control_restarts_total", ()] == 1.0
    assert (
        shown["gfdit_rank_busy_seconds_total", ("0",)] == 5.0 and shown["gfdit_rank_restarts_total", ("0",)] == 1.0
    )


def test_why_requests_should_go_elsewhere() -> None:
    engine: list[str | None] = [None]
    server = ServerMetrics(2, lambda: engine[0])
    assert server.why_not() == "starting"
    server.take(snapshot(up=(False, False)))
    assert server.why_not() == "no live rank"
    server.take(snapshot(up=(True, False)))
    assert server.why_not() is None
    engine[0] = "paused"
    assert server.why_not() == "paused" and scrape(server)["gfdit_ready", ()] == 0.0
    server.draining = True
    assert server.why_not() == "draining" and server.load()["draining"]


def test_the_load_by_class_and_due_time() -> None:
    server = ServerMetrics(2, clock=Clock())
    for name, slo_class, deadline_s in (("a", "fast", 104.0), ("b", "fast", 99.0), ("c", "default", None)):
        server.arrived(request(name, slo_class, deadline_s))
    rows = row("a", "fast", 104.0, 1.0), row("b", "fast", 99.0, 2.0), row("c", left_s=3.0), row("gone")
    server.take(snapshot(*rows, services=[Service("m", "64x64", 4, False, {1: 5.0, 2: 3.0})], up=(True, False)))
    server.arrived(request("gone"))
    server.ended("gone", "completed")
    load = server.load()
    assert (load["ready"], load["ranks"], load["live_ranks"], load["alive"], load["queued"]) == (True, 2, 1, 3, 3)
    assert load["age_s"] == 1.0 and load["unknown_costs"] == 0
    assert load["backlog_rank_s"] == 12.0 and load["backlog_rank_s_by_class"] == {"default": 6.0, "fast": 6.0}
    assert load["due"] == [
        {"within_s": 0.0, "slo_class": "fast", "backlog_rank_s": 4.0},
        {"within_s": 5.0, "slo_class": "fast", "backlog_rank_s": 2.0},
        {"within_s": None, "slo_class": "default", "backlog_rank_s": 6.0},
    ]
    assert load["services"][0]["seconds_by_degree"] == {"1": 5.0, "2": 3.0}
    assert scrape(server)["gfdit_backlog_rank_seconds", ("fast",)] == 6.0


def test_every_live_request_is_listed() -> None:
    server = ServerMetrics(2, clock=Clock())
    server.arrived(request("a", deadline_s=110.0))
    server.take(snapshot(row("a", deadline_s=110.0)))
    server.arrived(request("new"))
    first, second = server.requests()["requests"]
    assert first == {
        "id": "a",
        "model": "m",
        "slo_class": "default",
        "state": "running",
        "task": "denoise",
        "degree": 2,
        "ranks": [0, 1],
        "steps_done": 1,
        "num_steps": 4,
        "left_s": 4.0,
        "left_rank_s": 8.0,
        "deadline_in_s": 10.0,
        "slack_s": 6.0,
    }
    assert (second["id"], second["state"], second["slack_s"]) == ("new", "arriving", None)
    server.ended("a", "completed")
    assert [each["id"] for each in server.requests()["requests"]] == ["new"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is absent")
def test_names_and_help_are_as_prometheus_wants_them() -> None:
    server = ServerMetrics(2)
    server.take(snapshot())
    registry = CollectorRegistry()
    registry.register(server)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
