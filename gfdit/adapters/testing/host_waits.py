"""Finds, without a GPU, where the host would wait for one: values read back, and memory copied that is not pinned.

Tensors are followed through everything that Python asks of torch. Those of the loaded pipeline are on the device,
and so is whatever is made of such a tensor, or by naming the device; for that, the index 0 tells the device from
the host, which are both the CPU here. What happens inside a single call of torch is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gfdit.adapters.forward import waits as without_waits
from gfdit.adapters.forward.coroutine import Coroutine

DEVICE = torch.device("cpu", 0)
"""Stands in for a GPU."""

_READS = frozenset(
    {
        *("item", "tolist", "cpu", "numpy", "equal", "allclose", "is_nonzero"),
        *("linalg_solve", "linalg_inv", "linalg_cholesky"),
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__", "__contains__"),
        *("__repr__", "__format__"),
    }
)
_TAKE_NUMBERS = frozenset({"arange", "linspace", "full", "tensor", "as_tensor", "randint"})
_MAKE_OF_HOST_DATA = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor"})
_OWN = str(Path(__file__).parents[2])
# What stands between a call of torch and who makes it.
_BETWEEN = (__file__, without_waits.__file__)
_OUR_COMM = f"{_OWN}/comm/"


class HostWaits(TorchFunctionMode):
    """Within it, and while ``watching``, ``found`` collects a line for each place where the host would wait."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self.watching = True
        self._on_device: Any = WeakTensorKeyDictionary()
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._on_device[tensor] = True

    def is_on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._on_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = list(_tensors((args, kwargs)))
        from_device = any(self.is_on_device(tensor) for tensor in tensors)
        in_comm = self._in_comm()
        if func == torch.Tensor.device.__get__:
            return DEVICE if from_device and not in_comm else func(*args, **kwargs)
        if self.watching and not in_comm and (what := self._wait(name, args, kwargs, tensors)):
            self.found[f"{_place()}: {what}"] = None
        result = func(*args, **kwargs)
        target = _target(name, args, kwargs)
        # On a GPU, what collectives give and take is there.
        if in_comm or target == DEVICE or (target is None and from_device and name not in ("cpu", "numpy")):
            for tensor in _tensors(result):
                self._on_device[tensor] = True
        elif target is not None and isinstance(result, torch.Tensor) and result in self._on_device:
            result = result.clone()  # a copy on the host: here, torch returns the same tensor
        return result

    def _wait(self, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> str:
        """What the host would wait for; nothing, mostly."""
        on_device = [self.is_on_device(tensor) for tensor in tensors]
        if any(on_device):
            if name in _READS or name in _TAKE_NUMBERS:
                return name
            if name == "where" and len(args) + len(kwargs) == 1:
                return "where with one argument"
            if name == "repeat_interleave" and self.is_on_device(kwargs.get("repeats", args[1:2] and args[1])):
                return "" if "output_size" in kwargs else "repeat_interleave"
            if name in ("__getitem__", "__setitem__"):
                return self._index(name, args)
        target = _target(name, args, kwargs)
        waits_not = bool(kwargs.get("non_blocking"))
        if target is not None and not waits_not:
            if target == DEVICE and (not any(on_device)) and name in (*_MAKE_OF_HOST_DATA, "to", "cuda"):
                return f"{name} of host memory to the device"
            if target != DEVICE and any(on_device) and name == "to":
                return "to the host"
        if name == "copy_" and len(set(on_device[:2])) == 2 and not waits_not:
            return "copy_ from host memory" if on_device[0] else "copy_ to host memory"
        return ""

    def _index(self, name: str, args: Any) -> str:
        indexed, index = args[0], args[1]
        for tensor in _tensors(index):
            if self.is_on_device(tensor) and (tensor.dtype == torch.bool or tensor.ndim == 0):
                return (
                    f"{name} with a mask" if tensor.dtype == torch.bool else f"{name} with a number on the device"
                )
            if self.is_on_device(indexed) and not self.is_on_device(tensor) and tensor.ndim:
                return f"{name} with an index in host memory"
        if name == "__setitem__":
            value = args[2]
            host = isinstance(value, torch.Tensor) and value.ndim > 0 and not self.is_on_device(value)
            if host and self.is_on_device(indexed):
                return "__setitem__ from host memory"
        return ""

    def _in_comm(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(_OUR_COMM):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


@contextmanager
def on_stand_in(executor: Any, waits: HostWaits) -> Iterator[HostWaits]:
    """Have everything in ``executor`` that says which device it works on name :data:`DEVICE`."""

    def synchronize(*args: Any, **kwargs: Any) -> None:
        if waits.watching:
            waits.found[f"{_place()}: synchronize"] = None

    platform, pipeline = _platform(), executor.runner.pipeline
    named = [name for name, value in vars(pipeline).items() if isinstance(value, torch.device)]
    devices: Any = dict.fromkeys(["device", *named], DEVICE)
    run = Coroutine._main

    def watched(coroutine: Coroutine) -> None:  # modes are of a thread
        with waits:
            run(coroutine)

    with (
        mock.patch.object(Coroutine, "_main", watched),
        mock.patch.object(executor.adapter, "device", DEVICE),
        mock.patch.multiple(pipeline, create=True, **devices),
        mock.patch.object(platform, "synchronize", synchronize),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        waits,
    ):
        yield waits


def _platform() -> Any:
    from vllm_omni.platforms import current_omni_platform

    return type(current_omni_platform)


def _target(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names."""
    named = kwargs.get("device")
    if named is None and name == "to":
        named = next((arg for arg in args[1:] if isinstance(arg, (torch.device, str))), None)
        if named is None and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return None  # like another tensor, which is among the arguments
    return torch.device(named) if isinstance(named, (torch.device, str)) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, slice):
        yield from _tensors([value.start, value.stop, value.step])


def _place() -> str:
    """Who has called torch: function, and file from its package on."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file not in _BETWEEN and "/torch/" not in file and not file.endswith("/unittest/mock.py"):
            break
        frame = frame.f_back
    parts = Path(frame.f_code.co_filename).parts
    roots = ("site-packages", "lib")
    begin = max([index + 1 for index, part in enumerate(parts) if part in roots], default=0)
    if not begin and "gfdit" in parts:
        begin = len(parts) - parts[::-1].index("gfdit") - 1
    return f"{'/'.join(parts[begin:])}, {frame.f_code.co_name}"
