"""What has to be true of CUDA in a process whose kernels wait for those of others.

A collective waits on the device for a peer. Whatever makes the host, or another stream of this rank, wait for
that kernel in turn may close a circle that ends only with a time limit: a module that is loaded at its first
launch, two streams that share a hardware queue, a library that was handed the same stream of torch's pool.

Never run on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

_NON_BLOCKING = 1  # as torch's own: not ordered with the default stream


def prepare_process() -> None:
    """Before CUDA is initialised, in a rank process or in one that starts them.

    Raises ValueError where streams would share one queue to the device: an abort could not pass a waiting kernel.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a collective that waits hold up every other stream of its rank: "
            "unset it, or set it to 2 or more"
        )
    # A module that is loaded while a kernel waits may wait for that kernel.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    # With a pool of its own, torch hands out symmetric memory at another address than it maps.
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")


def new_stream(device: torch.device, *, urgent: bool = False, driver: Any = None) -> torch.cuda.Stream:
    """A stream that nobody else is handed: torch's pool gives each of its 32 to several.

    ``urgent``: what is launched on it goes before whatever else waits for a multiprocessor. It lives as long as
    the process. ``driver``: the CUDA driver's library. Raises RuntimeError if the driver refuses.
    """
    driver = driver or ctypes.CDLL("libcuda.so.1")
    lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the context is made current here
        _check(driver.cuCtxGetStreamPriorityRange(ctypes.byref(lowest), ctypes.byref(highest)))
        priority = highest if urgent else lowest
        _check(driver.cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, priority))
        return torch.cuda.ExternalStream(stream.value or 0, device)


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"the CUDA driver refuses a stream: error {result}")
