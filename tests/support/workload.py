"""Requests for tests of the control plane: plain trajectories and random graphs."""

from __future__ import annotations

import random

from gfdit.core import ParallelSpec, Request, Shape, Task, TaskGraph, TaskKind, trajectory
from gfdit.core.tasks import with_encoder

SP_1_2_4 = (ParallelSpec(1), ParallelSpec(2), ParallelSpec(4))
CFG_2 = (*SP_1_2_4, ParallelSpec(1, 2), ParallelSpec(2, 2))

Arrival = tuple[Request, TaskGraph]


def make_request(
    request_id: str,
    *,
    num_steps: int = 3,
    size: int = 512,
    arrival_s: float = 0.0,
    candidates: tuple[ParallelSpec, ...] = SP_1_2_4,
    model: str = "m",
    prepare: bool = True,
) -> Arrival:
    cfg = any(spec.cfg > 1 for spec in candidates)
    request = Request(request_id, model, Shape(size, size), num_steps, arrival_s, cfg=cfg)
    return request, trajectory(request_id, num_steps, candidates, prepare=prepare)


def random_requests(draw: random.Random, count: int) -> list[Arrival]:
    """Trajectories of all kinds; one in four branches and joins, one in five has two encoders."""
    requests = []
    for index in range(count):
        candidates = draw.choice([SP_1_2_4, CFG_2, SP_1_2_4[:1], SP_1_2_4[:2]])
        request, graph = make_request(
            f"r{index}",
            num_steps=draw.randrange(5),
            size=draw.choice([256, 512, 1024]),
            arrival_s=float(index),
            candidates=candidates,
            prepare=draw.random() < 0.5,
        )
        if draw.random() < 0.25:
            graph = random_graph(draw, request.id, candidates)
        if index % 5 == 3:
            graph = with_encoder(graph, "image", {TaskKind.DENOISE, TaskKind.DECODE})
        requests.append((request, graph))
    return requests


def random_graph(draw: random.Random, request_id: str, candidates: tuple[ParallelSpec, ...]) -> TaskGraph:
    """One encode task, then tasks that read any of what exists and make nothing, one or two artifacts."""
    made: list[str] = []
    tasks = []
    for index in range(draw.randrange(1, 7)):
        inputs = tuple(draw.sample(made, draw.randint(1, min(3, len(made))))) if made else ()
        outputs = tuple(f"{request_id}/x{index}.{k}" for k in range(draw.choice([0, 1, 1, 2]) or not made))
        kind = TaskKind.DENOISE if made else TaskKind.ENCODE
        specs = candidates if made else candidates[:1]
        tasks.append(Task(f"{request_id}/t{index}", request_id, kind, index, inputs, outputs, specs))
        made.extend(outputs)
    return TaskGraph(request_id, tuple(tasks))


def fan_graph(request_id: str, candidates: tuple[ParallelSpec, ...], num_rounds: int) -> TaskGraph:
    """Rounds of three tasks that read the same artifact; one of them makes that of the next round."""
    encode = Task(f"{request_id}/t0", request_id, TaskKind.ENCODE, 0, (), (f"{request_id}/x0",), candidates[:1])
    tasks = [encode]
    for number in range(1, num_rounds + 1):
        for outputs in ((f"{request_id}/x{number}",), (), ()):
            index = len(tasks)
            inputs = (f"{request_id}/x{number - 1}",)
            task_id = f"{request_id}/t{index}"
            tasks.append(Task(task_id, request_id, TaskKind.DENOISE, index, inputs, outputs, candidates))
    return TaskGraph(request_id, tuple(tasks))
