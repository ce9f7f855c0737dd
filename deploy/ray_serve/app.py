"""Servers of gfdit behind Ray Serve: each request goes where nothing becomes late by it.

A ``Server`` passes requests on to one `gfdit serve` and tells Ray Serve that server's load, every second. The
request router chooses by what all of them say and by what it has sent there since (:mod:`gfdit.core.routing`).
``Front`` reads what a request asks for, and sends it elsewhere when the server it was sent to dies, or drains.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any

import httpx
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response

from gfdit.core.routing import Ask, Replica, ReplicaLoad, ask_for, choose, forecast

STATS_PERIOD_S = 1.0
ANSWER_TIMEOUT_S = 1800.0  # a video, and waiting for it
GIVE_UP_S = 60.0  # with no server that would take a request
SEND_AGAIN = (502, 503, 504)
_HOP = ("host", "connection", "content-length", "transfer-encoding", "keep-alive")  # are of one connection


class DeadlineAware(RequestRouter):
    """Each :class:`Server` is a replica here. ``wants`` and ``not_on`` of a request are from :class:`Front`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._known: dict[ReplicaID, Replica] = {}
        self._told: dict[ReplicaID, float] = {}  # the last that each said, by the time it was said there

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best first. None while no server is ready: Ray Serve asks again."""
        wants: Mapping[str, Any] = {} if pending_request is None else pending_request.kwargs.get("wants", {})
        not_on = () if pending_request is None else pending_request.kwargs.get("not_on", ())
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        candidates = [one for one in candidate_replicas if one.replica_id.unique_id not in not_on]
        loads = [self._load_of(replica) for replica in candidates]
        ask = _ask(loads, wants)
        if (chosen := choose(loads, ask)) is None:
            return []
        others = [index for index, load in enumerate(loads) if index != chosen and load.ready]
        others.sort(key=lambda index: forecast(loads[index], ask))
        return [[candidates[index]] for index in (chosen, *others)]

    def _load_of(self, replica: RunningReplica) -> ReplicaLoad:
        known = self._known.setdefault(replica.replica_id, Replica())
        stats = replica.routing_stats
        if stats and self._told.get(replica.replica_id) != stats["at_s"]:
            self._told[replica.replica_id] = stats["at_s"]
            if stats["load"] is None:
                known.told(ReplicaLoad(ready=False, live_ranks=0), time.monotonic())
            else:
                # By this clock, not that of another node: what was sent meanwhile may count twice for a moment.
                at_s = time.monotonic() - STATS_PERIOD_S - stats["load"]["age_s"]
                known.told(ReplicaLoad.of_json(stats["load"]), at_s)
        return known.load

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        ask = _ask([one.load for one in self._known.values()], pending_request.kwargs.get("wants", {}))
        self._known[replica_id].sent(ask, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._known[replica_id].ended()


def _ask(loads: list[ReplicaLoad], wants: Mapping[str, Any]) -> Ask:
    return ask_for(loads, wants.get("size"), wants.get("num_steps"), wants.get("deadline_in_s"))


@serve.deployment(
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(
        request_router_class=DeadlineAware,
        request_routing_stats_period_s=STATS_PERIOD_S,
        request_routing_stats_timeout_s=5.0,
    ),
)
class Server:
    def __init__(self, urls: list[str], api_key: str | None) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._url = urls[context.rank.rank].rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits)
        self._asking = httpx.AsyncClient(timeout=2.0, trust_env=False, headers=headers)

    async def record_routing_stats(self) -> dict[str, Any]:
        load = None
        try:
            answer = await self._asking.get(f"{self._url}/v1/gfdit/load")
            if answer.status_code == httpx.codes.OK:
                ReplicaLoad.of_json(load := answer.json())
        except (httpx.HTTPError, ValueError):
            load = None
        return {"load": load, "at_s": time.time()}

    async def send(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: bytes,
        wants: Mapping[str, Any],
        not_on: tuple[str, ...],
    ) -> tuple[str, int | None, list[tuple[str, str]], bytes]:
        """Who answers, and the answer; its status is None if there is none."""
        try:
            answer = await self._client.request(method, self._url + path, headers=headers, content=body)
        except httpx.TransportError as error:
            return self._name, None, [], repr(error).encode()
        # The body is no longer compressed.
        kept = [(k, v) for k, v in answer.headers.multi_items() if k.lower() not in (*_HOP, "content-encoding")]
        return self._name, answer.status_code, kept, answer.content


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Front:
    def __init__(self, servers: DeploymentHandle, num_servers: int) -> None:
        self._servers = servers
        self._num_servers = num_servers

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
        wants, not_on = what_is_wanted(body), set[str]()
        give_up_s = time.monotonic() + GIVE_UP_S
        while True:
            name, status, answered, content = await self._servers.send.remote(
                request.method, path, headers, body, wants=wants, not_on=tuple(not_on)
            )
            if status is not None and status not in SEND_AGAIN:
                break
            if time.monotonic() > give_up_s:
                break
            not_on.add(name)
            if len(not_on) >= self._num_servers:
                not_on.clear()
                await asyncio.sleep(1.0)
        response = Response(content, status or 502)
        for key, value in answered:
            response.headers.append(key, value)
        return response


def what_is_wanted(body: bytes) -> dict[str, Any]:
    """Of a request in JSON, as far as it says, ``size`` (height first), ``num_steps`` and ``deadline_in_s``.

    Of a form (an edit), nothing: it counts as one of average length without a deadline.
    """
    try:
        asked = json.loads(body)
        options = (asked.get("extra_params") or {}).get("gfdit") or {}
        width, _, height = str(asked.get("size") or "").partition("x")
        deadline_s = float(options["deadline_ms"]) / 1e3 if options.get("deadline_ms") else math.inf
        return {
            "size": f"{height}x{width}" if height else None,
            "num_steps": int(asked["num_inference_steps"]) if asked.get("num_inference_steps") else None,
            "deadline_in_s": deadline_s if math.isfinite(deadline_s) else None,
        }
    except (ValueError, AttributeError, TypeError, OverflowError):  # for the server to refuse
        return {}


def application(args: Mapping[str, Any]) -> serve.Application:
    """``urls`` of the servers, and ``api_key`` if they have one."""
    urls = list(args["urls"])
    servers = Server.options(num_replicas=len(urls)).bind(urls, args.get("api_key"))
    return Front.bind(servers, len(urls))
