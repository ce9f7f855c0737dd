"""What an engine counts of its requests, and the routes over it, behind vLLM's own check of the API key."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from vllm_omni.errors import OmniClientError

from tests.support.lone_engine import PATIENCE_S, LoneEngine, image_request, lone_engine  # isort: skip

from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm_omni.diffusion.data import DiffusionOutput

from gfdit.core import commands as cmd
from gfdit.observe.metrics import SHOWN
from gfdit.observe.snapshot import RankNumbers, RequestState, Snapshot
from gfdit.omni.http_operations import add_operations
from gfdit.runtime import messages as msg
from tests.support.waiting import wait_until

MADE = pickle.dumps(DiffusionOutput(output="an image"))
SNAPSHOT = Snapshot(0, 0.0, [RankNumbers(True, False, False, 0, 0.0, 0.0, 0, 0)] * 2)


@pytest.fixture
def engine() -> Iterator[LoneEngine]:
    with lone_engine(max_requests=2, max_queue_s=1000.0) as engine:
        yield engine


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def ask(engine: LoneEngine, *messages: Any, **sampling: Any) -> DiffusionOutput:
    """One request, which ends as ``messages`` say once it has arrived."""

    async def exchange() -> DiffusionOutput:
        answer = asyncio.create_task(engine.ask(image_request(**sampling)))
        while not engine.scheduler.num_waiting_requests():
            await asyncio.sleep(0.001)
        engine.executor.client.tell(*messages)
        return await asyncio.wait_for(answer, PATIENCE_S)

    return asyncio.run(exchange())


def test_requests_are_counted_as_they_end(engine: LoneEngine) -> None:
    options = {"extra_args": {"gfdit": {"slo_class": "fast", "deadline_ms": 600_000}}}
    assert value("gfdit_requests_total", slo_class="default", outcome="completed") == 0.0
    ask(engine, cmd.StartRequest("r1", 0.5), msg.Result("r1", MADE), cmd.CompleteRequest("r1"), **options)
    assert value("gfdit_requests_total", slo_class="fast", outcome="completed") == 1.0
    assert value("gfdit_deadlines_met_total", slo_class="fast") == 1.0
    assert value("gfdit_queue_wait_seconds_sum", slo_class="fast") == 0.5
    options = {"extra_args": {"gfdit": {"slo_class": "fast", "deadline_ms": 600_000}}}
    ask(engine, cmd.RejectRequest("r1", "it would be late"), **options)
    assert value("gfdit_requests_rejected_total", reason="admission") == 1.0
    assert value("gfdit_deadlines_missed_total", slo_class="fast") == 1.0
    ask(engine, cmd.FailRequest("r1", "it waited", 503, waited=True))
    ask(engine, cmd.FailRequest("r1", "no rank", 503))
    ask(engine, cmd.FailRequest("r1", "it does not fit", 400))
    ask(engine, cmd.StartRequest("r1", 0.5), cmd.FailRequest("r1", "it broke", 500))
    for reason in ("queue_timeout", "unavailable", "too_large"):
        assert value("gfdit_requests_rejected_total", reason=reason) == 1.0, reason
    assert value("gfdit_requests_total", slo_class="default", outcome="failed") == 1.0
    assert value("gfdit_requests_total", slo_class="default", outcome="rejected") == 3.0
    assert value("gfdit_requests_alive", slo_class="default") == 0.0


def test_what_the_engine_turns_away_is_counted(engine: LoneEngine) -> None:
    for wrong in ({"num_inference_steps": 10_000}, {"extra_args": {"gfdit": {"deadline_ms": -1}}}):
        with pytest.raises(OmniClientError):
            asyncio.run(engine.ask(image_request(**wrong)))
    assert value("gfdit_requests_rejected_total", reason="invalid") == 2.0

    async def too_many() -> None:
        await engine._check_and_start_background_loop()
        for name in ("r1", "r2"):
            engine.add_request(image_request(name))
        wait_until(lambda: engine._num_alive == 2, "both are alive")
        assert value("gfdit_requests_alive", slo_class="default") == 2.0
        with pytest.raises(OmniClientError, match="2 requests are alive already"):
            engine.add_request(image_request("r3"))
        engine.abort(["r1", "r2"])
        wait_until(lambda: value("gfdit_requests_alive", slo_class="default") == 0.0, "both have left")

    asyncio.run(too_many())
    assert value("gfdit_requests_rejected_total", reason="too_many_requests") == 1.0
    assert value("gfdit_requests_total", slo_class="default", outcome="cancelled") == 2.0


class Api:
    """The routes as a server has them: added when it has started, behind the key."""

    def __init__(self, client: Any = None) -> None:
        self.app = FastAPI()
        self.app.state.engine_client = client
        self.app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
        self.get("/health")  # from here on its middleware is made
        add_operations(self.app)

    def get(self, path: str, key: str = "secret") -> httpx.Response:
        async def get() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.get(path, headers={"Authorization": f"Bearer {key}"})

        return asyncio.run(get())


def test_without_the_key_nothing_is_told(engine: LoneEngine) -> None:
    api = Api()
    for route in ("ready", "load", "requests"):
        assert api.get(f"/v1/gfdit/{route}", key="guess").status_code == 401


def test_readiness_is_not_liveness(engine: LoneEngine) -> None:
    api, client = Api(), engine.executor.client

    def ready() -> tuple[int, str | None]:
        answer = api.get("/v1/gfdit/ready")
        assert answer.json()["ready"] is (answer.status_code == 200)
        return answer.status_code, answer.json()["reason"]

    assert ready() == (503, "starting")
    client.tell(SNAPSHOT)
    wait_until(lambda: ready() == (200, None), "the control process has told of its ranks")
    engine._scheduling_paused = True
    assert ready() == (503, "paused")
    engine._scheduling_paused = False
    client.tell(Snapshot(0, 0.0, [RankNumbers(False, False, False, 0, 0.0, 0.0, 0, 0)] * 2))
    wait_until(lambda: ready() == (503, "no live rank"), "both ranks are lost")
    engine.executor.check_health()
    engine.metrics.draining = True
    assert ready() == (503, "draining") and api.get("/v1/gfdit/load").json()["draining"] is True
    engine.metrics.draining = False
    engine.executor.mark_failed("the control process ended")
    assert ready() == (503, "the engine is down")


def test_load_and_requests_say_what_the_control_process_told(engine: LoneEngine) -> None:
    api = Api()
    row = RequestState("r1", "m", "default", "running", "denoise", (0, 1), 1, 4, None, 3.0, 6.0)
    engine.executor.client.tell(Snapshot(0, 0.0, SNAPSHOT.ranks, requests=[row]))
    wait_until(lambda: api.get("/v1/gfdit/load").json()["live_ranks"] == 2, "the snapshot is there")
    assert api.get("/v1/gfdit/load").json()["backlog_rank_s"] == 6.0
    (listed,) = api.get("/v1/gfdit/requests").json()["requests"]
    assert (listed["id"], listed["degree"], listed["left_s"]) == ("r1", 2, 3.0)


def test_a_process_without_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHOWN, "server", None)
    api = Api()
    for route in ("ready", "load", "requests"):
        answer = api.get(f"/v1/gfdit/{route}")
        assert answer.status_code == 503 and "one replica per server" in answer.text


def test_gauges_of_vllm_omni_are_right_at_every_scrape(engine: LoneEngine) -> None:
    """Not only when an output arrives; one request of three is still preprocessed."""
    registry = CollectorRegistry()
    running, waiting = [Gauge(name, name, registry=registry) for name in ("running", "waiting")]
    metrics = SimpleNamespace(_running=running, _waiting=waiting, _log_stats=True)
    Api(SimpleNamespace(prom_metrics=metrics, request_states={"r1": 1, "r2": 2, "r3": 3}))

    async def requests() -> None:
        await engine._check_and_start_background_loop()
        for name in ("r1", "r2"):
            engine.add_request(image_request(name))
        engine.executor.client.tell(cmd.StartRequest("r1", 0.0))
        wait_until(lambda: registry.get_sample_value("running") == 1.0, "one runs")

    asyncio.run(requests())
    running.set(17)  # as vLLM-Omni does
    assert registry.get_sample_value("running") == 1.0 and registry.get_sample_value("waiting") == 2.0
