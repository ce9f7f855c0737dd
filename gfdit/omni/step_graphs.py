"""Forward passes of a transformer as CUDA graphs: captured once for each shape and layout, replayed afterwards.

At high degrees a step is bound by its host, which launches some thousands of kernels. A graph launches them at
once. Collectives may be inside: their counters are on the device, so every replay agrees anew, and it makes no
difference to a rank whether its peers replay a graph, capture one or run as ever. That is why each rank decides
for itself, on first use beside serving: a call of a kind met a few times before is captured, then replayed.

A graph holds the memory it was captured with. What all of them hold is bounded; those not used for the longest
time go first. Inputs are copied into the graph's own tensors, outputs out of them.

Where it may be used: for modules whose passes do the same whatever the step, but for their tensors. Whether that
is so is the model's business. What depends on values of tensors on the host cannot be captured; such a module runs
as ever. Never run on a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from gfdit.adapters import masked_tokens

logger = logging.getLogger("gfdit.omni")

# So often a call runs as ever before it is captured: what is loaded or tuned at first use is there by then.
_CALLS_BEFORE = 2
# Kinds of calls that are counted, and remembered as impossible.
_MAX_KINDS = 1024
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class Graph(Protocol):
    """What was captured. ``outputs`` are filled by ``replay``, ``num_bytes`` held until it is dropped."""

    outputs: Any
    num_bytes: int

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Any]], Graph]


@dataclass(slots=True)
class _Captured:
    graph: Graph
    inputs: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.graph.num_bytes + sum(tensor.nbytes for tensor in self.inputs)


class StepGraphs:
    """Of one worker: for any number of modules, within ``limit_bytes``."""

    def __init__(self, limit_bytes: int, capture: Capture | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.num_replays = 0
        self._capture = capture or CudaGraph
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._calls: Counter[Hashable] = Counter()
        self._impossible: set[Hashable] = set()

    @property
    def held_bytes(self) -> int:
        return sum(captured.num_bytes for captured in self._graphs.values())

    def wrap(self, module: torch.nn.Module, layout: Callable[[], Hashable]) -> None:
        """From now on calls of ``module`` are replayed where they can be. ``layout``: that of the running task."""
        forward = module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if masked_tokens.current() is not None:  # what is kept of one pass is written by another
                return forward(*args, **kwargs)
            return self.call(forward, (id(module), layout()), args, kwargs)

        module.forward = wrapped

    def call(self, run: Callable[..., Any], where: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``run`` returns, for the caller to keep; ``where`` tells calls apart that look the same."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        kind = where, structure, _kind_of(leaves)
        if kind[-1] is None or kind in self._impossible:
            return run(*args, **kwargs)
        captured = self._graphs.get(kind)
        if captured is None:
            self._calls[kind] += 1
            if self._calls[kind] <= _CALLS_BEFORE:
                _forget_oldest(self._calls)
                return run(*args, **kwargs)
            captured = self._captured(run, kind, leaves, structure)
            if captured is None:
                return run(*args, **kwargs)
        self._graphs.move_to_end(kind)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for own, given in zip(captured.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        captured.graph.replay()
        self.num_replays += 1
        return pytree.tree_map_only(torch.Tensor, torch.clone, captured.graph.outputs)

    def _captured(
        self, run: Callable[..., Any], kind: Hashable, leaves: Sequence[Any], structure: Any
    ) -> _Captured | None:
        """None, once and for all, if such calls cannot be captured or would hold more than there may be."""
        del self._calls[kind]
        own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, structure)
        try:
            graph = self._capture(lambda: run(*args, **kwargs))
        except RuntimeError as error:
            logger.warning("a forward pass cannot be captured and runs as ever: %s", error)
            self._never(kind)
            return None
        captured = _Captured(graph, [leaf for leaf in own if isinstance(leaf, torch.Tensor)])
        if captured.num_bytes > self.limit_bytes:
            logger.warning(
                "a captured forward pass would hold %d bytes of %d and runs as ever",
                captured.num_bytes,
                self.limit_bytes,
            )
            self._never(kind)
            return None
        while self._graphs and self.held_bytes + captured.num_bytes > self.limit_bytes:
            self._graphs.popitem(last=False)
        self._graphs[kind] = captured
        return captured

    def _never(self, kind: Hashable) -> None:
        if len(self._impossible) >= _MAX_KINDS:
            self._impossible.clear()
        self._impossible.add(kind)


class CudaGraph:
    """Captured on the current stream. Never run on a GPU."""

    def __init__(self, run: Callable[[], Any]) -> None:
        before = torch.cuda.memory_allocated()
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        # Thread-local: the migration lane of this process may go on doing what a capture may not.
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.outputs = run()
        finally:
            self._graph.capture_end()
        self.num_bytes = torch.cuda.memory_allocated() - before

    def replay(self) -> None:
        self._graph.replay()


def _kind_of(leaves: Sequence[Any]) -> Hashable | None:
    """What a graph depends on but for the values of tensors; None if that cannot be told."""
    kinds: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif isinstance(leaf, _CONSTANTS):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return tuple(kinds)


def _forget_oldest(calls: Counter[Hashable]) -> None:
    if len(calls) > _MAX_KINDS:
        del calls[next(iter(calls))]
