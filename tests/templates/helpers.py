"""Small templates whose values tell whose they are, and a process that ends at a system call of one's choice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.store import TemplateStore
from gfdit.templates.units import Unit

BLOCKS, TOKENS, HEAD_SIZE, HEADS = 2, 6, 8, 2
#: Of a file with a unit of the shape above in float32: a page and the values.
FILE_BYTES = 4096 + BLOCKS * 2 * TOKENS * HEAD_SIZE * 4
#: What changes files, in ``os``: between two of these it does not matter when a process ends.
CALLS = ("open", "write", "ftruncate", "rename", "unlink", "mkdir", "rmdir", "utime")


def template(name: object) -> TemplateKey:
    return TemplateKey.of(
        image=str(name), model="tiny", size=(64, 64), sigmas=[1.0, 0.5], prompts=["a"], guidance=1.0, noise=0
    )


def values_of(key: UnitKey) -> torch.Tensor:
    """Other values for every unit."""
    seed = int(str(key.template)[:8], 16) + key.step * 100 + key.branch * 10 + key.head
    return torch.randn(BLOCKS, 2, TOKENS, HEAD_SIZE, generator=torch.Generator().manual_seed(seed))


def is_right(key: UnitKey, unit: Unit | None) -> bool:
    return unit is not None and unit.scales is None and torch.equal(unit.values, values_of(key))


class Stores:
    """Opens stores in one folder, as several processes would, and keeps what they say."""

    def __init__(self, path: Path, shared: Path) -> None:
        self.path, self.shared = path, shared
        self.messages: list[str] = []
        self._open: list[TemplateStore] = []

    def open(self, host_units: int = 100, disk_units: int | None = 1000, **options: Any) -> TemplateStore:
        """With room for so many units."""
        store = TemplateStore(
            None if disk_units is None else self.path,
            self.shared,
            host_bytes=host_units * FILE_BYTES,
            disk_bytes=(disk_units or 0) * FILE_BYTES,
            **{"on_message": self.messages.append, **options},
        )
        self._open.append(store)
        return store

    def close(self) -> None:
        for store in self._open:
            store.close()


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def put_all(store: TemplateStore, key: TemplateKey, steps: int = 1) -> bool:
    keys = [UnitKey(key, step, 0, head) for step in range(steps) for head in range(HEADS)]
    return all([store.put(key, values_of(key)) for key in keys])


def read(store: TemplateStore, key: UnitKey) -> Unit | None:
    with store.reading(key.template) as reading:
        return reading.get(key.step, key.branch, key.head)


def in_a_fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process. Its status as of ``os.waitpid``."""
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def at_call(
    patch: pytest.MonkeyPatch, number: int, action: Callable[[], object], calls: tuple[str, ...] = CALLS
) -> None:
    """From now on ``action`` comes before the ``number``-th of these calls, counted from 1."""
    made = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == number:
                action()
            return original(*args, **options)

        return call

    for name in calls:
        patch.setattr(os, name, wrapped(getattr(os, name)))


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
