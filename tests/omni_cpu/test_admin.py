"""What an operator changes, by the routes of a server whose control process is the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm_omni.errors import OmniClientError

from tests.support.lone_engine import PATIENCE_S, LoneEngine, image_request, lone_engine  # isort: skip

from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from gfdit.core.cost.table import CostEntry, CostTable
from gfdit.core.tasks import TaskKind
from gfdit.observe.snapshot import RankNumbers, Snapshot
from gfdit.omni.http_front import HttpFront
from gfdit.omni.http_operations import REFUSED, WITHOUT_KEY, WITHOUT_PROFILER, add_operations, refuse
from gfdit.runtime import messages as msg
from gfdit.runtime.client import RuntimeDownError
from tests.support.waiting import wait_until

UP = RankNumbers(True, False, False, 0, 0.0, 0.0, 0, 0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LoneEngine]:
    with lone_engine(policy="fcfs", record=str(tmp_path / "recording")) as engine:
        engine.executor.client.tell(Snapshot(0, 0.0, [UP, UP]))
        wait_until(lambda: engine.metrics.ranks_up() == [0, 1], "both ranks are known")
        yield engine


class Server:
    """The routes behind key and front; ``answer`` is what the control process says of a change."""

    def __init__(self, engine: LoneEngine, *, key: bool = True) -> None:
        self.engine = engine
        self.app = FastAPI()

        @self.app.post("/v1/images/generations")
        async def generate() -> str:
            return "an image"

        @self.app.get("/health")
        async def health() -> str:
            return "well"

        self.app.state.engine_client = None
        if key:
            self.app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
        self.app.add_middleware(HttpFront)
        self.call("GET", "/health")  # from here on its middleware is made
        add_operations(self.app)

    def call(self, method: str, path: str, body: Any = None, key: str = "secret") -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(
                    method,
                    path,
                    headers={"Authorization": f"Bearer {key}"},
                    content=None if body is None else body,
                )

        return asyncio.run(call())

    def change(self, answer: str | None = "", /, **change: Any) -> httpx.Response:
        """``answer`` None: the control process is not asked."""
        told: list[httpx.Response] = []
        body = json.dumps(change).encode()
        thread = threading.Thread(target=lambda: told.append(self.call("POST", "/v1/gfdit/admin", body)))
        thread.start()
        if answer is not None:
            change_id, self.told = self.engine.executor.client.changes.get(timeout=PATIENCE_S)
            self.engine.executor.client.tell(msg.Reconfigured(change_id, answer))
        thread.join(PATIENCE_S)
        assert self.engine.executor.client.changes.empty()
        return told[0]

    told: Mapping[str, Any]

    def state(self) -> dict[str, Any]:
        return self.call("GET", "/v1/gfdit/admin").json()


def table(model: str) -> CostTable:
    entry = CostEntry(model, TaskKind.DENOISE, 64, 64, 1, False, 1, 1, 1, 0.5)
    return CostTable("a machine", "a test", 0.0, 1.0, (entry,))


def test_all_of_a_change_is_in_force_once_the_control_process_has_said_so(
    engine: LoneEngine, tmp_path: Path
) -> None:
    server = Server(engine)
    table("none").save(tmp_path / "costs")
    limits = {"max_requests": 1, "max_steps": 3, "max_queue_s": 5.0}
    costs = json.loads((tmp_path / "costs").read_text())
    changed = server.change(
        policy="triage",
        policy_args={"price": 4},
        admission="deadline",
        limits=limits,
        costs=costs,
        record=False,
        drain_ranks=[1],
    )
    assert changed.status_code == 200, changed.text
    told = server.told
    assert (told["policy"], told["policy_args"], told["admission"]) == ("triage", {"price": "4"}, "deadline")
    assert (told["max_queue_s"], told["record_path"], told["drained"]) == (5.0, None, (1,))
    assert CostTable.load(told["costs_path"]) == table("none")
    state = server.state()
    assert changed.json() == state
    assert (state["policy"], state["costs"], state["record"]) == ("triage", "a test", None)
    assert (state["drained_ranks"], state["limits"]["max_requests"]) == ([1], 1)
    with pytest.raises(OmniClientError, match="num_inference_steps"):
        asyncio.run(engine.ask(image_request(num_inference_steps=4)))
    assert server.change(add_ranks=[1], record=True, costs=None).json()["drained_ranks"] == []
    assert (server.told["record_path"], server.told["costs_path"]) == (str(tmp_path / "recording"), None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"policy": "quickest"},
            "policy 'quickest' is neither installed nor that of the server's start, allowed: ",
        ),
        ({"policy": "os:path"}, "policy 'os:path' is neither installed"),
        ({"policy": "triage", "policy_args": {"prize": 4}}, "policy triage has no argument 'prize', known: "),
        ({"policy_args": {"group_size": "many"}}, "policy fcfs: argument group_size must be int, got 'many'"),
        ({"admission": "lottery"}, "admission must be none, deadline, promise, got 'lottery'"),
        ({"limits": {"max_requests": 0}}, "gfdit setting 'max_requests' is 0: expected int >= 1"),
        ({"limits": {"min_sp": 2}}, "limit 'min_sp' cannot be changed while the server runs, known: max_steps"),
        ({"limits": {"max_steps": 3, "max_pixels": "all"}}, "gfdit setting 'max_pixels' is 'all': expected int"),
        ({"costs": {"version": 1}}, "costs: "),
        ({"timeline": True}, "the server was started without --timeline FILE"),
        ({"drain_ranks": [2]}, "there is no rank 2: the server has 2"),
        ({"drain_ranks": [0, 1]}, "0 live ranks would be left, and at least 1 are needed"),
        ({"add_ranks": [0]}, "rank 0 is not drained"),
        ({"drain": "please"}, "Expected bool, got str - at $.drain"),
        ({"polity": "fcfs"}, "Object contains unknown field polity"),
        (["fcfs"], "Expected object, got array"),
    ],
)
def test_what_cannot_be_changes_nothing(engine: LoneEngine, change: Any, line: str) -> None:
    server = Server(engine)
    before, settings = server.state(), engine.settings
    good = {"limits": {"max_outputs": 1}} if isinstance(change, dict) and "limits" not in change else {}
    body = {**change, **good} if isinstance(change, dict) else change
    answer = server.call("POST", "/v1/gfdit/admin", json.dumps(body).encode())
    assert answer.status_code == 400 and answer.json()["error"].startswith(line), answer.text
    assert "\n" not in answer.json()["error"]
    assert server.state() == before and engine.settings is settings
    assert engine.executor.client.changes.empty() and not list(engine.executor.run_dir.iterdir())


def test_costs_of_another_model_are_refused(engine: LoneEngine, tmp_path: Path) -> None:
    table("another").save(tmp_path / "costs")
    answer = Server(engine).change(None, costs=json.loads((tmp_path / "costs").read_text()))
    assert answer.json()["error"] == "costs has no times of 'none', known: another"


def test_what_the_control_process_refuses_changes_nothing(engine: LoneEngine) -> None:
    server = Server(engine)
    before = server.state()
    answer = server.change("request r1 could not go on: it takes 2 ranks", limits={"max_steps": 3}, drain=True)
    assert answer.status_code == 400 and answer.json()["error"].startswith("request r1 could not go on")
    assert server.state() == before


def test_without_a_key_nothing_is_changed(engine: LoneEngine) -> None:
    body = json.dumps({"drain": True}).encode()
    assert Server(engine).call("POST", "/v1/gfdit/admin", body, key="guess").status_code == 401
    answer = Server(engine, key=False).call("POST", "/v1/gfdit/admin", body)
    assert (answer.status_code, answer.json()["error"]) == (403, WITHOUT_KEY)
    assert not engine.metrics.draining


def test_a_drained_server_is_not_ready_but_healthy(engine: LoneEngine) -> None:
    server = Server(engine)
    assert server.change(drain=True).json()["drain"] is True
    ready = server.call("GET", "/v1/gfdit/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
    assert server.call("GET", "/v1/gfdit/load").json()["draining"] is True
    assert server.call("GET", "/health").status_code == 200
    refused = server.call("POST", "/v1/images/generations", b"{}")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert "drained" in refused.json()["error"]["message"]
    server.change(drain=False)
    assert server.call("POST", "/v1/images/generations", b"{}").json() == "an image"
    assert server.call("GET", "/v1/gfdit/ready").status_code == 200


def test_what_does_not_go_with_the_engine_is_refused_in_a_line(engine: LoneEngine) -> None:
    server = Server(engine)
    before = server.state()
    for path, line in {**REFUSED, **WITHOUT_PROFILER}.items():
        answer = server.call("POST", path, b"{}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (501, line)
    assert server.state() == before and server.call("GET", "/v1/gfdit/ready").status_code == 200
    assert server.call("POST", "/v1/omni/sleep", b"{}", key="guess").status_code == 401


def test_routes_that_work_stay() -> None:
    """Those of a profiler that there is; none twice."""
    app = FastAPI()
    for path in ("/start_profile", "/v1/omni/sleep"):
        app.post(path)(lambda: "done")
    refuse(app)
    paths = [getattr(route, "path", "") for route in app.routes]
    assert "/stop_profile" not in paths and paths.count("/start_profile") == 1 == paths.count("/v1/omni/sleep")


def test_a_paused_server_is_not_ready(engine: LoneEngine) -> None:
    """Whoever paused it: vLLM-Omni holds requests back before they come to the engine."""
    server = Server(engine)
    server.app.state.engine_client = client = SimpleNamespace(_paused=True)
    add_operations(server.app)
    assert server.call("GET", "/v1/gfdit/ready").json()["reason"] == "paused"
    client._paused = False
    assert server.call("GET", "/v1/gfdit/ready").status_code == 200


def test_who_waits_for_a_change_is_told_that_the_engine_is_down(engine: LoneEngine) -> None:
    server, told = Server(engine), []
    body = json.dumps({"policy": "triage"}).encode()
    thread = threading.Thread(target=lambda: told.append(server.call("POST", "/v1/gfdit/admin", body)))
    thread.start()
    engine.executor.client.changes.get(timeout=PATIENCE_S)
    engine.executor.client.break_by(RuntimeDownError("no worker is left"))
    thread.join(PATIENCE_S)
    assert told[0].status_code == 503 and "no worker is left" in told[0].text
    assert server.call("POST", "/v1/gfdit/admin", body).status_code == 503
