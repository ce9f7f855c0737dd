"""Run on a rank by ``apply``: passes of the transformers are traced once, and only what was traced runs again.

A stand-in for CUDA graphs that shows what they would show: Python code that does something else at another step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What a stream that is capturing refuses: the host would wait for a value.
_REFUSED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Every operation in its order, with the tensors that it took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out


class TracedGraph:
    """The operations of one call, on the tensors that it was made with."""

    def __init__(self, run: Callable[[], Any]) -> None:
        with Tape() as tape:
            self._given = run()
        self._operations = tape.operations
        self.outputs: Any = None
        self.num_bytes = 1

    def replay(self) -> None:
        now: dict[int, torch.Tensor] = {}  # by what stood in its place when the tape was made

        def current(value: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda tensor: now.get(id(tensor), tensor), value)

        for func, args, kwargs, out in self._operations:
            made = func(*current(args), **current(kwargs))
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor):
                    now[id(old)] = new
        self.outputs = current(self._given)


def capture_steps(executor: Any) -> bool:
    from gfdit.comm import operators
    from gfdit.omni.step_graphs import StepGraphs

    def capture(run: Callable[[], Any]) -> TracedGraph:
        with operators.rehearsal():  # as in a capture, nothing is sent
            return TracedGraph(run)

    executor.graphs = StepGraphs(1 << 30, capture)
    executor.runner.capture_steps(executor.graphs)
    return executor.adapter.captures_steps


def num_replays(executor: Any) -> int:
    return executor.graphs.num_replays
