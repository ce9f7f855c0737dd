"""Rows between two tensors by the copy engines of a GPU, which take no multiprocessor.

Torch copies what is not contiguous by a kernel. The driver takes one block of rows at a time, each with its own
distance between rows. Never run on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_UNIFIED = 4  # an address of any memory: the driver looks it up


_END = (
    ("XInBytes", ctypes.c_size_t),
    ("Y", ctypes.c_size_t),
    ("MemoryType", ctypes.c_uint),
    ("Host", ctypes.c_void_p),
    ("Device", ctypes.c_uint64),
    ("Array", ctypes.c_void_p),
    ("Pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver."""

    _fields_ = (
        *(("src" + name, kind) for name, kind in _END),
        *(("dst" + name, kind) for name, kind in _END),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def copy_rows(target: torch.Tensor, source: torch.Tensor, stream: int | None, driver: Any = None) -> None:
    """``target`` := ``source``, both (batch, rows, heads, head size), each row dense, on a stream of the driver.

    Without a stream, on a CPU, torch copies. ``driver``: the CUDA driver's library. Raises RuntimeError if the
    driver refuses.
    """
    if stream is None:
        target.copy_(source)
        return
    if source.numel() == 0:
        return
    driver = driver or ctypes.CDLL("libcuda.so.1")
    num_bytes = source.element_size()
    for to, out_of in zip(target, source, strict=True):
        block = _Copy2D(
            srcMemoryType=_UNIFIED,
            srcDevice=out_of.data_ptr(),
            srcPitch=out_of.stride(0) * num_bytes,
            dstMemoryType=_UNIFIED,
            dstDevice=to.data_ptr(),
            dstPitch=to.stride(0) * num_bytes,
            WidthInBytes=out_of[0].numel() * num_bytes,
            Height=out_of.shape[0],
        )
        result = driver.cuMemcpy2DAsync_v2(ctypes.byref(block), ctypes.c_void_p(stream))
        if result != 0:
            raise RuntimeError(f"the CUDA driver refuses a copy of rows: error {result}")
