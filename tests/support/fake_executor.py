"""A worker's executor without a model: artifacts are small tensors, and a group task is a barrier."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping

import torch

from gfdit.comm import GroupFreeComm
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, TaskKind
from gfdit.migration.parts import ArtifactParts
from gfdit.runtime.executor import Results, TaskError


class FakeExecutor:
    """``payload`` of a request: seconds per task, or an instruction for its first task (see ``execute``).

    A request called ``early-3-1...`` fails in step 3 on rank 1, before the barrier; ``late-3-1...`` after it.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, comm: GroupFreeComm) -> None:
        self.rank = rank
        self.comm = comm
        self.artifacts: dict[str, torch.Tensor] = {}

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        (task,) = tasks
        if task.request_id in payloads:
            self._obey(payloads[task.request_id].decode())
        total = torch.zeros(2)
        for name in task.inputs:
            total = total + self.artifacts[name]  # KeyError if a migration was forgotten
        self._fail_if_told(task, "early")
        if len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))
        self._fail_if_told(task, "late")
        time.sleep(float(total[1]))
        for name in task.outputs:
            self.artifacts[name] = torch.tensor([float(task.step_index), self.task_s])
        made = {task.request_id: str(os.getpid()).encode()} if task.kind is TaskKind.DECODE else {}
        return lambda: made

    def _obey(self, instruction: str) -> None:
        if instruction == "die":
            os._exit(7)
        if instruction == "client error":
            raise TaskError("the client is to blame", status_code=422)
        if instruction == "raise":
            raise ValueError("a bug")
        self.task_s = float(instruction)

    def _fail_if_told(self, task: Task, when: str) -> None:
        word, *numbers = task.request_id.split("-")
        told = word == when and [task.step_index, self.rank] == [int(number) for number in numbers[:2]]
        if told and task.kind is TaskKind.DENOISE:
            raise ValueError("a bug")

    task_s = 0.0

    def export_artifact(self, artifact: str) -> ArtifactParts:
        if artifact.startswith("unsendable"):
            raise TypeError("cannot pickle this")
        return ArtifactParts(b"", {"value": self.artifacts[artifact]})

    def import_artifact(self, artifact: str, parts: ArtifactParts) -> None:
        self.artifacts[artifact] = parts.tensors["value"]

    def free(self, artifacts: tuple[str, ...]) -> None:
        for name in artifacts:
            self.artifacts.pop(name, None)

    def call(self, method: str, payload: bytes) -> bytes:
        args, kwargs = pickle.loads(payload)
        return pickle.dumps(getattr(self, method)(*args, **kwargs))

    def held(self) -> list[str]:
        return sorted(self.artifacts)

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise RuntimeError("no such luck")

    def close(self) -> None:
        pass


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> FakeExecutor:
    if payload == b"fail to start":
        raise RuntimeError("out of memory")
    return FakeExecutor(rank, comm)
