"""Ranks that hold components and no pipeline, driven by functions that run in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from gfdit.adapters.testing.processes import ChildError, ForkServer
from gfdit.comm import create_heap


class ComponentRanks:
    """``num_ranks`` processes on a CPU; ``model`` is any checkpoint of a pipeline, and is not loaded.

    A failure in one of them is a :class:`ChildError`, after which they are of no more use to each other.
    """

    def __init__(self, server: ForkServer, num_ranks: int, model: str, comm_timeout_s: float = 30.0) -> None:
        self._closing = ExitStack()
        try:
            heap = create_heap("shared_memory", num_ranks).held_open()
            self._closing.callback(heap.unlink)
            self._children = []
            for rank in range(num_ranks):
                child = server.start(f"rank {rank}", _Service(), rank, heap, model, comm_timeout_s)
                self._closing.callback(child.close)
                self._children.append(child)
            for child in self._children:
                child.wait_ready()
        except BaseException:
            self.close()
            raise

    def call(self, fn: Callable[..., Any], *args: Any, rank: int = 0) -> Any:
        """``fn(rank, *args)`` in one of them, which is a :class:`ComponentRank` there."""
        return self._children[rank].call("apply", fn, *args)

    def call_all(self, ranks: Sequence[int], fn: Callable[..., Any], *args: Any) -> list[Any]:
        """In ``ranks`` at the same time. Raises the first failure once all have answered."""
        for rank in ranks:
            self._children[rank].post("apply", fn, *args)
        answers, failure = [], None
        for rank in ranks:
            try:
                answers.append(self._children[rank].collect())
            except ChildError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> ComponentRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Service:
    """Pickled by reference: where it is made, vLLM-Omni is imported, and here it is not."""

    def __call__(self, *args: Any) -> Any:
        from gfdit.adapters.testing.component_rank import ComponentRank

        return ComponentRank(*args)
