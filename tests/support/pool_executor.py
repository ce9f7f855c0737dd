"""A worker's executor for workflows without models: nets send numbers part by part, a base model adds them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gfdit.comm import GroupFreeComm
from gfdit.core.components import Component
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, TaskKind
from gfdit.runtime.executor import Results, TaskError
from tests.support.fake_executor import FakeExecutor

NUM_PARTS = 5


class PoolExecutor(FakeExecutor):
    """Latents are one number: a step adds one for itself and the parts of its nets, 0 + 1 + ... each.

    ``payload`` of a request: seconds per part. A net of a request called ``bad-<step>`` fails in that step after
    two parts, the first time; of one called ``dies-<step>`` it ends its process. A component called
    ``unloadable...`` has no weights.
    """

    def __init__(self, rank: int, comm: GroupFreeComm, components: Mapping[str, Component], folder: str) -> None:
        super().__init__(rank, comm, folder)
        self.components = components
        self.loaded = {name for name, one in components.items() if one.pinned and one.may_be_on(rank)}
        self.num_streamed = 0

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        self.loaded.difference_update(evict)
        if name.startswith("unloadable"):
            raise FileNotFoundError(f"{name} has no weights")
        time.sleep(self.components[name].load_s)
        self.loaded.add(name)
        return self.components[name].num_bytes

    def resident(self) -> tuple[str, ...]:
        return tuple(sorted(self.loaded))

    def streamed(self) -> int:
        return self.num_streamed

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        made = {}
        for task in tasks:
            if task.component not in self.loaded:
                raise TaskError(f"{task.component} is not loaded on rank {self.rank}")
            artifact = self._run(task, payloads)
            for name in task.outputs:
                self.layouts[name], self.artifacts[name] = layout, artifact
            if not task.outputs and self.rank == layout.ranks[0]:
                made[task.request_id] = str(int(artifact["value"])).encode()
        if len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))
        return lambda: made

    def _run(self, task: Task, payloads: Mapping[str, bytes]) -> dict[str, Any]:
        inputs = [self.artifacts[name] for name in task.inputs]
        if not inputs:
            return {"value": torch.zeros(1), "part_s": float(payloads[task.request_id])}
        value, part_s = inputs[-1]["value"], inputs[-1]["part_s"]
        if task.kind is TaskKind.CONTROL:
            return {"parts": self._make_parts(task, part_s), "part_s": part_s}
        if task.kind is TaskKind.DENOISE:
            for name in task.deferred:
                value = value + sum(float(self._part(name, index)) for index in range(NUM_PARTS))
            value = value + 1
        return {"value": value, "part_s": part_s}

    def _part(self, name: str, index: int) -> torch.Tensor:
        if self.streams.is_stream(name):
            part = self.streams.fetch(name, index)
            self.num_streamed += 1
        else:
            part = self.artifacts[name]["parts"][index]
        assert part.shape == (2, 1000) and bool((part == index).all())
        return part.view(-1)[0]

    def _make_parts(self, task: Task, part_s: float) -> list[torch.Tensor]:
        parts = []
        for index in range(NUM_PARTS):
            time.sleep(part_s)
            if index == 2:
                self._fail_if_told_once(task)
            parts.append(torch.full((2, 1000), float(index)))
            self.streams.emit(task.outputs[0], parts[-1])
        return parts

    def _fail_if_told_once(self, task: Task) -> None:
        word, _, step = task.request_id.partition("-")
        if word in ("bad", "dies") and task.step_index == int(step):
            mark = Path(self.folder, task.request_id)
            if not mark.exists():
                mark.touch()
                if word == "dies":
                    os._exit(7)
                raise RuntimeError("a bug in a net")


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> PoolExecutor:
    components, folder = pickle.loads(payload)
    return PoolExecutor(rank, comm, components, folder)
