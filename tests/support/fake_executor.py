"""A worker's executor without a model: artifacts are small tensors, and a group task is a barrier.

Latents are really split between steps: over guidance branches, sequence shards or both.
"""

from __future__ import annotations

import os
import pickle
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gfdit.comm import GroupFreeComm
from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task, TaskKind, artifact_kind
from gfdit.migration.codec import FieldCodec, Sharding
from gfdit.migration.parts import ArtifactParts
from gfdit.runtime.executor import Results, TaskError
from gfdit.runtime.messages import Holding
from gfdit.runtime.streams import Streams

# Branches, tokens, channels; 4 bytes an element, more than travels with the metadata.
SHAPE = (2, 2049, 5)
CODEC = FieldCodec({"rows": Sharding("shape", sp_dim=1, cfg_dim=0)})


def rows_of(layout: ExecutionLayout, rank: int, step: int) -> torch.Tensor:
    """What ``rank`` has to hold before ``step``: every element tells its place and the steps so far."""
    whole = torch.arange(SHAPE[0] * SHAPE[1] * SHAPE[2]).view(SHAPE) + 1_000_000 * step
    box = FieldView("rows", "int64", 8, SHAPE, sp_dim=1, cfg_dim=0).box(layout, rank)
    return whole[tuple(slice(*part) for part in box)].clone()


class FakeExecutor:
    """``payload`` of a request: seconds per task, or an instruction for its first task (see ``execute``).

    A request called ``early-3-1...`` fails in step 3 on rank 1, before the barrier; ``late-3-1...`` after it.
    Where rank 1 takes no part it fails on another one: that is its own fault. One called ``narrow-3-2...`` runs
    out of memory in every step from 3 on that takes fewer than 2 ranks. One called ``stuck-3-1...`` never gets
    past that barrier; with a folder for its marks, only the first time. What ``unsendable`` has is sent from no
    rank, what ``unsendable-0`` has not from rank 0.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, comm: GroupFreeComm, folder: str = "") -> None:
        self.rank = rank
        self.comm = comm
        self.folder = folder
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.layouts: dict[str, ExecutionLayout | None] = {}  # under which it got them

    def execute(self, tasks: tuple[Task, ...], layout: ExecutionLayout, payloads: Mapping[str, bytes]) -> Results:
        (task,) = tasks
        if self.faulty:
            raise RuntimeError("a sticky error")
        if task.request_id in payloads:
            self._obey(payloads[task.request_id].decode())
        total = torch.zeros(2)
        for name in task.inputs:
            total = total + self.artifacts[name]["value"]  # KeyError if a migration was forgotten
            if (rows := self.artifacts[name].get("rows")) is not None:
                step = self.artifacts[name]["step"]
                assert torch.equal(rows, rows_of(layout, self.rank, step)), f"{name} is not what {layout} needs"
        self._fail_if_told(task, layout, "early")
        self._get_stuck_if_told(task)
        self._exhaust_if_told(task, layout)
        if len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))
        self._fail_if_told(task, layout, "late")
        time.sleep(float(total[1]))
        for name in task.outputs:
            self.layouts[name] = layout
            self.artifacts[name] = {"value": torch.tensor([float(task.step_index), self.task_s])}
            if artifact_kind(task.request_id, name) == "latents":
                self.artifacts[name] |= self._latents(task, layout)
        made = {task.request_id: str(os.getpid()).encode()} if task.kind is TaskKind.DECODE else {}
        return lambda: made

    def _latents(self, task: Task, layout: ExecutionLayout) -> dict[str, Any]:
        if task.kind is not TaskKind.DENOISE:
            return {"step": 0, "shape": SHAPE, "rows": rows_of(layout, self.rank, 0)}
        before = self.artifacts[task.inputs[-1]]
        return {"step": before["step"] + 1, "shape": SHAPE, "rows": before["rows"] + 1_000_000}

    def _obey(self, instruction: str) -> None:
        if instruction == "die":
            os._exit(7)
        if instruction == "client error":
            raise TaskError("the client is to blame", status_code=422)
        if instruction == "raise":
            raise ValueError("a bug")
        self.task_s = float(instruction)

    def _fail_if_told(self, task: Task, layout: ExecutionLayout, when: str) -> None:
        told = self._told(task, when)
        if told is not None and self.rank == (told if told in layout.ranks else layout.ranks[0]):
            raise ValueError("a bug")

    def _get_stuck_if_told(self, task: Task) -> None:
        if self._told(task, "stuck") == self.rank:
            if self.folder:
                mark = Path(self.folder, task.request_id)
                if mark.exists():
                    return
                mark.touch()
            while True:
                time.sleep(1.0)

    def _exhaust_if_told(self, task: Task, layout: ExecutionLayout) -> None:
        word, *numbers = task.request_id.split("-")
        if word != "narrow" or task.kind is not TaskKind.DENOISE or task.step_index < int(numbers[0]):
            return
        if len(layout.ranks) < int(numbers[1]):
            large = torch.ones(1000)  # what a frame of the failed task keeps alive
            self.large = weakref.ref(large)
            raise torch.OutOfMemoryError(f"tried to allocate {large.numel()} GiB")

    def _told(self, task: Task, what: str) -> int | None:
        """The rank that is to do ``what`` in this task, if any is."""
        word, *numbers = task.request_id.split("-")
        if word != what or task.kind is not TaskKind.DENOISE or task.step_index != int(numbers[0]):
            return None
        return int(numbers[1])

    task_s = 0.0
    faulty = False
    large: weakref.ref[torch.Tensor] | None = None
    num_reclaims = 0

    def memory_use(self) -> MemoryUse | None:
        return None

    def memory_points(self) -> tuple[MemoryPoint, ...]:
        return ()

    def reclaim(self) -> None:
        assert self.large is not None and self.large() is None, "the failed task still holds memory"
        self.num_reclaims += 1

    def output_views(self, tasks: tuple[Task, ...]) -> tuple[tuple[str, ArtifactView], ...]:
        made = [name for task in tasks if task.kind is not TaskKind.DENOISE for name in task.outputs]
        return tuple((name, CODEC.view(self.artifacts[name])) for name in made)

    def export_artifact(self, artifact: str) -> ArtifactParts:
        word, _, rank = artifact.partition("/")[0].partition("-")
        if word == "unsendable" and rank in ("", str(self.rank)):
            raise TypeError("cannot pickle this")
        parts = CODEC.pack(self.artifacts[artifact])
        parts.layout = self.layouts[artifact]
        return parts

    def import_artifact(self, artifact: str, parts: ArtifactParts, view: ArtifactView) -> None:
        self.layouts[artifact] = parts.layout
        self.artifacts[artifact] = CODEC.unpack(parts, self.device)

    def free(self, artifacts: tuple[str, ...]) -> None:
        for name in artifacts:
            self.artifacts.pop(name, None)
            self.layouts.pop(name, None)

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(name, layout, CODEC.view(self.artifacts[name]))
            for name, layout in self.layouts.items()
            if layout is not None
        )

    streams: Streams

    def load_component(self, name: str, evict: tuple[str, ...]) -> int:
        raise AssertionError("there are no components")

    def resident(self) -> tuple[str, ...]:
        return ()

    def probe(self) -> None:
        if self.faulty:
            raise RuntimeError("a sticky error")

    def call(self, method: str, payload: bytes) -> bytes:
        args, kwargs = pickle.loads(payload)
        return pickle.dumps(getattr(self, method)(*args, **kwargs))

    def held(self) -> list[str]:
        return sorted(self.artifacts)

    def pid(self) -> int:
        return os.getpid()

    def reclaims(self) -> int:
        return self.num_reclaims

    def become_faulty(self) -> None:
        self.faulty = self.rank == 1

    def fail(self) -> None:
        raise RuntimeError("no such luck")

    def close(self) -> None:
        pass


def make_executor(rank: int, comm: GroupFreeComm, payload: bytes) -> FakeExecutor:
    if payload == b"fail to start":
        raise RuntimeError("out of memory")
    if payload.startswith(b"load for ever "):
        Path(payload.decode().removeprefix("load for ever "), str(rank)).touch()
        time.sleep(3600)
    return FakeExecutor(rank, comm, payload.decode())
