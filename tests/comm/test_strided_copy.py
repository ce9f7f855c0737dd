"""What the CUDA driver is asked to copy: by a driver that does as its manual says, on a CPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfdit.comm.strided_copy import copy_rows


def driver(streams: list[int | None], result: int = 0) -> SimpleNamespace:
    def copy(pointer: Any, stream: ctypes.c_void_p) -> int:
        block = pointer._obj
        streams.append(stream.value)
        for y in range(block.Height):
            ctypes.memmove(
                block.dstDevice + y * block.dstPitch, block.srcDevice + y * block.srcPitch, block.WidthInBytes
            )
        return result

    return SimpleNamespace(cuMemcpy2DAsync_v2=copy)


def test_rows_go_where_they_belong_and_nothing_else_is_touched() -> None:
    source = torch.arange(2 * 5 * 6 * 4, dtype=torch.bfloat16).view(2, 5, 6, 4)[:, 1:4, 2:5]
    room = torch.full((2, 9, 3, 4), -1.0, dtype=torch.bfloat16)
    streams: list[int | None] = []
    copy_rows(room[:, 4:7], source, 77, driver(streams))
    assert torch.equal(room[:, 4:7], source) and streams == [77, 77]
    assert (room[:, :4] == -1).all() and (room[:, 7:] == -1).all()


def test_nothing_to_copy_and_a_driver_that_refuses() -> None:
    streams: list[int | None] = []
    copy_rows(torch.empty(2, 0, 3, 4), torch.empty(2, 0, 3, 4), 1, driver(streams))
    assert streams == []
    with pytest.raises(RuntimeError, match="error 700"):
        copy_rows(torch.empty(1, 2, 3, 4), torch.empty(1, 2, 3, 4), 1, driver(streams, result=700))
