"""A forward that launches its steps without the host waiting for the device, with the numbers that it would have.

Stock loops ask the device for numbers that came from the host: which expert a timestep is for, where it is in the
schedule, coefficients that are read back only to be sent again. On a GPU the host would wait for all that it has
launched, several times a step. So small tensors that were sent to the device are remembered as they were sent, and
so is what exact arithmetic makes of them. What is asked of such a tensor is answered by the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_HOST = torch.device("cpu")
#: Numbers of a tensor that is remembered: schedules are no longer.
_MAX_NUMEL = 4096
_READS = frozenset(
    {
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__contains__",
    }
)
#: What the host makes of numbers as a device does, bit by bit.
_EXACT = frozenset(
    {
        *("__getitem__", "unbind", "select", "squeeze", "unsqueeze", "flatten", "reshape", "view", "expand"),
        *("flip", "cat", "clone", "detach", "contiguous", "float", "double", "long", "abs", "neg", "argmin"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "lt", "le", "gt", "ge", "eq", "ne"),
        *("add", "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__truediv__", "true_divide"),
        *("__radd__", "__rsub__", "__rmul__", "rsub", "__neg__", "any", "all", "max", "min"),
    }
)


class WithoutWaits(TorchFunctionMode):
    """While it is on, copies from the host are begun and not waited for, and nothing known is read from a device.

    Memory that is not pinned is copied aside before such a call returns, so it may be changed or freed then.
    ``torch.linalg.solve`` does not look whether it has failed, which would be reading from the device, too: a
    singular matrix makes numbers that are not finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakTensorKeyDictionary()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing within costs a look, unless another mode has been entered on top of this one."""
        if _get_current_function_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _READS and args and (host := self._host_of(args[0])) is not None:
            return func(host, *args[1:], **kwargs)
        if name == "nonzero" and (host := self._host_of(args[0])) is not None:
            return self._sent(host.nonzero(), args[0].device)
        if func is torch.Tensor.to:
            return self._moved(args, kwargs)
        if func is torch.tensor and kwargs.get("device") is not None:
            return self._made(*args, **kwargs)
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **kwargs, check_errors=False)[0]
        made = func(*args, **kwargs)
        if self._known:
            if name in _EXACT:
                self._follow(func, args, kwargs, made)
            elif name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                self._forget(args[0])
        return made

    def _host_of(self, tensor: Any) -> torch.Tensor | None:
        return self._known.get(tensor) if isinstance(tensor, torch.Tensor) else None

    def _remember(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        if tensor.numel() <= _MAX_NUMEL and tensor.device != _HOST:
            self._known[tensor] = host
        return tensor

    def _moved(self, args: Any, kwargs: Any) -> torch.Tensor:
        given = args[0]
        host = self._host_of(given)
        if given.device == _HOST:
            kwargs["non_blocking"] = True
            host = given if given.numel() <= _MAX_NUMEL else None
        made = torch.Tensor.to(*args, **kwargs)
        if host is None or made.device == _HOST:
            return made
        return self._remember(made, host.to(made.dtype, copy=given.device == _HOST))

    def _sent(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self._remember(host.to(device, non_blocking=True), host)

    def _made(self, data: Any, *, device: Any, dtype: torch.dtype | None = None, **rest: Any) -> torch.Tensor:
        """``torch.tensor`` of numbers, or of a list of them and of scalars on ``device``."""
        if not (isinstance(data, list) and any(isinstance(item, torch.Tensor) for item in data)):
            return self._sent(torch.tensor(data, dtype=dtype), device)
        dtype = dtype or reduce(torch.promote_types, [_type_of(item) for item in data])
        return torch.stack(
            [
                item.to(device, dtype, non_blocking=True)
                if isinstance(item, torch.Tensor)
                else torch.full((), item, dtype=dtype, device=device)
                for item in data
            ]
        )

    def _follow(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Make the same of what is known, if all of it is; tensors on the host are."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(tensor in self._known for tensor in tensors):
            return
        if not all(tensor in self._known or tensor.device == _HOST for tensor in tensors):
            return
        on_host = tree_map_only(torch.Tensor, lambda tensor: self._known.get(tensor, tensor), (args, kwargs))
        hosts = tree_leaves(func(*on_host[0], **on_host[1]))
        for one, host in zip(tree_leaves(made), hosts, strict=True):
            if isinstance(one, torch.Tensor):
                self._remember(one, host)

    def _forget(self, changed: Any) -> None:
        """It was changed in place, and with it all that shares its memory."""
        if isinstance(changed, torch.Tensor):
            storage = changed.untyped_storage().data_ptr()
            for tensor in [one for one in self._known if one.untyped_storage().data_ptr() == storage]:
                del self._known[tensor]


def _type_of(item: Any) -> torch.dtype:
    return item.dtype if isinstance(item, torch.Tensor) else torch.tensor(item).dtype
