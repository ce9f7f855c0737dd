"""Transformer blocks that vLLM-Omni compiles: what keeps it at one graph for each degree.

Unless ``enforce_eager`` says otherwise, vLLM-Omni gives every repeated block of a transformer a compiled
``forward``, for tensors of any size. A graph is guarded by all that it depended on. Which ranks a task runs on is
not among that (:mod:`gfdit.comm.operators`), but tensors say it all the same: a rank's part of a sequence is a
view into the whole, whose strides and beginning tell how long that is and which part it is. So blocks get
contiguous tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.experimental._config
from torch._dynamo.utils import counters

from gfdit.adapters import masked_tokens

# Graphs that are kept of one kind of block, before torch gives up compiling it: degrees times classes of shapes.
MAX_GRAPHS_PER_BLOCK = 64

# Where vLLM-Omni's hooks keep what they are around.
_HOOKED_FORWARD = "_omni_original_forward"


def prepare_compiled_blocks(model: torch.nn.Module) -> int:
    """Give the compiled blocks in ``model`` plain tensors; returns how many there are.

    What vLLM-Omni's hooks do around a block, splitting tensors for example, has been done by then.
    """
    num_blocks = 0
    for module in model.modules():
        for name in ("forward", _HOOKED_FORWARD):
            compiled = module.__dict__.get(name)
            if compiled is not None and _is_compiled(compiled):
                setattr(module, name, _with_plain_tensors(compiled))
                num_blocks += 1
    if num_blocks:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS_PER_BLOCK)
        # Else a graph made when a size happens to equal another one holds only where they are equal again.
        torch.fx.experimental._config.use_duck_shape = False
    return num_blocks


def num_compilations() -> int:
    """Graphs that this process has compiled so far."""
    return counters["stats"]["unique_graphs"]


def num_graph_breaks() -> int:
    """How often a graph ended before its block did, since this process began."""
    return sum(counters["graph_break"].values())


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many graphs were compiled since."""
    before = num_compilations()
    yield lambda: num_compilations() - before


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def _with_plain_tensors(compiled: Callable[..., Any]) -> Callable[..., Any]:
    original = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if masked_tokens.current() is not None:  # what attention does then is no part of a graph
            return original(*args, **kwargs)
        return compiled(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    return forward


def plain(value: Any) -> Any:
    """``value``, its tensors contiguous and at the beginning of their memory; also in tuples and lists.

    Strides of dimensions with a single element mean nothing and may be anything; graphs are guarded by them, too.
    """
    if isinstance(value, torch.Tensor):
        if value.storage_offset() == 0 and value.stride() == _strides(value.shape):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))
