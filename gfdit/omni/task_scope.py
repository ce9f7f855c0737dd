"""The parallel configuration of the task that runs now, and everything in vLLM-Omni that must see it.

vLLM-Omni fixes sequence and CFG parallelism when a process starts: in two module globals, in one shared
configuration object and in its model hooks. All three are read again at every forward pass, so making them
answer from the running task gives every task its own ordered ranks and degrees, without a process group and
without patching a function. Outside a task each rank is alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gfdit.comm import Group, GroupFreeComm, operators
from gfdit.core.layouts import ExecutionLayout


@dataclass(slots=True)
class TaskScope:
    """What this rank is part of right now; one instance per worker process, read by the stand-ins.

    A compiled block is compiled again wherever what it has read is another. So inside of blocks only ``sp_degree``
    may be read of the groups, the number of ranks in ``sp``, and what differs among groups of one degree not at
    all: the operators of :mod:`gfdit.comm.operators` look it up. ``order`` is for them.
    """

    rank: int
    comm: GroupFreeComm
    sp: Group
    cfg: Group
    decode: Group
    sp_degree: int = 1
    order: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.order = operators.order(self.comm.device)

    @classmethod
    def alone(cls, rank: int, comm: GroupFreeComm) -> TaskScope:
        group = comm.group((rank,))
        return cls(rank, comm, sp=group, cfg=group, decode=group)

    @contextmanager
    def enter(self, layout: ExecutionLayout, parallel_config: Any, *, decode: bool = False) -> Iterator[None]:
        """Run the body as a member of ``layout``; always returns to being alone.

        ``parallel_config`` is vLLM-Omni's ``DiffusionParallelConfig``, one object shared by configuration,
        runner, pipeline and attention blocks. A model that shards while ``sequence_parallel_size`` says 1
        computes a wrong image without any error, so this assignment is as necessary as the groups.

        With ``decode`` the ranks share the tiles of the VAE and nothing else: for models each of them is alone.
        """
        before = self.sp, self.sp_degree, self.cfg, self.decode, parallel_config.sequence_parallel_size
        if decode:
            self.decode = self.comm.group(layout.ranks)
        else:
            self.sp = self.comm.group(layout.sp_ranks(self.rank))
            self.sp_degree = len(self.sp)
            self.cfg = self.comm.group(layout.cfg_ranks(self.rank))
            parallel_config.sequence_parallel_size = layout.parallel.sp
        try:
            with operators.collectives_among(self.comm, sp=self.sp, cfg=self.cfg):
                self._meet(layout)
                yield
        finally:
            self.sp, self.sp_degree, self.cfg, self.decode, parallel_config.sequence_parallel_size = before

    def _meet(self, layout: ExecutionLayout) -> None:
        """On a GPU, let one warp wait for members that come later: they may still be at another task.

        Later collectives then wait for ranks at work, so that no grid of programs spins for as long as a task.
        """
        if self.comm.device.type == "cuda" and len(layout.ranks) > 1:
            self.comm.barrier(self.comm.group(layout.ranks))


class GroupStandIn:
    """Takes the place of vLLM-Omni's SP or CFG ``GroupCoordinator`` and answers for the running task.

    ``which`` is ``"sp"`` or ``"cfg"``. What would need a real process group raises, so that a model which
    communicates behind these methods is noticed rather than hanging.
    """

    ring_world_size = 1
    ring_rank = 0
    allgather_world_size = 1
    allgather_rank = 0

    def __init__(self, scope: TaskScope, which: str) -> None:
        self._scope = scope
        self._which = which

    @property
    def _group(self) -> Group:
        return getattr(self._scope, self._which)

    @property
    def world_size(self) -> int:
        return len(self._group.ranks)

    @property
    def rank_in_group(self) -> int:
        return self._group.ranks.index(self._scope.rank)

    @property
    def ranks(self) -> list[int]:
        return list(self._group.ranks)

    @property
    def rank(self) -> int:
        return self._scope.rank

    local_rank = rank
    ulysses_world_size = world_size
    ulysses_rank = rank_in_group

    def all_gather(
        self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather along ``dim`` in group order, as ``GroupCoordinator.all_gather`` does.

        A group of one returns the tensor itself, also with ``separate_tensors``, like vLLM-Omni.
        """
        size = self.world_size
        if size == 1:
            return input_
        gathered = operators.all_gather(self._scope.order, input_, self._which, size)
        parts = list(gathered.chunk(size))
        return parts if separate_tensors else torch.cat(parts, dim=dim)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group, bit-identical on every member."""
        if not operators.is_rehearsal():
            self._scope.comm.all_reduce(input_, self._group)
        return input_

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Broadcast from group rank ``src``."""
        if not operators.is_rehearsal():
            self._scope.comm.broadcast(input_, self._group.ranks[src], self._group)
        return input_

    def destroy(self) -> None:
        """Nothing to destroy; the real coordinators are put back before vLLM-Omni shuts down."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of the {self._which.upper()} group is not available under gfdit: "
            "the model communicates through a process group, which elastic tasks do not have"
        )


class TaskDegrees:
    """Takes the place of ``SequenceParallelConfig`` in the model hooks: the degree is the task's."""

    ring_degree = 1
    allgather_degree = 1

    def __init__(self, scope: TaskScope) -> None:
        self._scope = scope

    @property
    def ulysses_degree(self) -> int:
        return len(self._scope.sp.ranks)

    sequence_parallel_size = ulysses_degree
