"""Schedulers that build small tensors of numbers the device has, without the host waiting for it.

Stock's multistep schedulers send sigmas to the device at every step, and read coefficients back from there only to
send them again as one tensor. On a GPU the host would wait for all that it has launched, several times a step. The
numbers are computed where and how they were.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")


class WithoutWaits(TorchFunctionMode):
    """Within it, copies from the host are begun and not waited for, and a tensor of device scalars is made there.

    Memory that is not pinned is copied aside before such a call returns, so it may be changed or freed then.
    ``torch.linalg.solve`` does not look whether it has failed, which would be reading from the device, too: a
    singular matrix makes numbers that are not finite.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and args[0].device == _HOST:
            kwargs["non_blocking"] = True
        elif func is torch.tensor and kwargs.get("device") is not None:
            return _tensor(*args, **kwargs)
        elif func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **kwargs, check_errors=False)[0]
        return func(*args, **kwargs)


def _tensor(data: Any, *, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.tensor`` of numbers, or of a list of them and of scalars on ``device``."""
    if not (isinstance(data, list) and any(isinstance(item, torch.Tensor) for item in data)):
        return torch.tensor(data, dtype=dtype).to(device, non_blocking=True)
    dtype = dtype or reduce(torch.promote_types, [_type_of(item) for item in data])
    return torch.stack(
        [
            item.to(device, dtype, non_blocking=True)
            if isinstance(item, torch.Tensor)
            else torch.full((), item, dtype=dtype, device=device)
            for item in data
        ]
    )


def _type_of(item: Any) -> torch.dtype:
    return item.dtype if isinstance(item, torch.Tensor) else torch.tensor(item).dtype
