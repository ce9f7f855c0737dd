"""What is asked of CUDA before it is initialised, and of its driver for a stream: without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfdit.comm import create_heap
from gfdit.comm.cuda_setup import new_stream, prepare_process


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "TORCH_SYMMMEM_IMPLICIT_POOL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield


def test_modules_are_loaded_before_anything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    prepare_process()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER" and os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] == "0"


def test_one_queue_for_all_streams_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    prepare_process()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for refused in (prepare_process, lambda: create_heap("torch_symmetric", 2)):
        with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1.*unset it, or set it to 2 or more"):
            refused()


def fake_driver(result: int, streams: list[tuple[int, int]]) -> SimpleNamespace:
    """Puts flags and priority of every stream into ``streams``; a stream's handle is its number."""

    def priorities(lowest: Any, highest: Any) -> int:
        lowest._obj.value, highest._obj.value = 0, -5
        return result

    def create(stream: Any, flags: int, priority: ctypes.c_int) -> int:
        streams.append((flags, priority.value))
        stream._obj.value = len(streams)
        return 0

    return SimpleNamespace(cuCtxGetStreamPriorityRange=priorities, cuStreamCreateWithPriority=create)


def test_streams_are_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handles.append(handle))
    streams: list[tuple[int, int]] = []
    driver, device = fake_driver(0, streams), torch.device("cuda", 0)
    for urgent in (False, True):
        new_stream(device, urgent=urgent, driver=driver)
    assert handles == [1, 2]
    assert streams == [(1, 0), (1, -5)]  # not ordered with the default stream; the second goes first
    with pytest.raises(RuntimeError, match="refuses a stream: error 201"):
        new_stream(device, driver=fake_driver(201, streams))
