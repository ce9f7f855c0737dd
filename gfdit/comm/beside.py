"""Collectives beside what a rank computes: on a lane and, on a GPU, a stream of their own.

The lane belongs to another one: what is aborted, reset or checked there is so here. Where a heap has no such lane,
and on a CPU, they run when they are issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gfdit.comm.cuda_setup import new_stream

if TYPE_CHECKING:
    from gfdit.comm.group_free_comm import GroupFreeComm


class Beside:
    """Of one lane; see ``GroupFreeComm.beside``. GPU streams never run on a GPU."""

    def __init__(self, comm: GroupFreeComm, stream: torch.cuda.Stream | None) -> None:
        self.comm = comm
        self._stream = stream

    @classmethod
    def of(cls, comm: GroupFreeComm) -> Beside:
        """On a stream of its own if ``comm``, which is the lane's communicator, is on a GPU."""
        return cls(comm, new_stream(comm.device, urgent=True) if comm.device.type == "cuda" else None)

    @contextmanager
    def running(self, tensors: Sequence[torch.Tensor]) -> Iterator[GroupFreeComm]:
        """What the body issues begins when the current stream is done with what it has, and goes on beside it.

        ``tensors`` are those that it reads and writes; use none of them before ``join``.
        """
        if self._stream is None:
            yield self.comm
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.comm.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield self.comm

    def join(self) -> None:
        """What the current stream is given from now on begins when all of that is done."""
        if self._stream is not None:
            torch.cuda.current_stream(self.comm.device).wait_stream(self._stream)
