"""A worker on a CPU bounds what it keeps of freed memory when it drops artifacts."""

from __future__ import annotations

from collections.abc import Callable

from gfdit.omni.executor import OmniExecutor
from gfdit.runtime.host_memory import FreedMemory, keep_freed_memory
from tests.runtime.test_host_memory import MB, NUM_BLOCKS, gaps


def fill_and_free(executor: OmniExecutor) -> tuple[dict[str, int], dict[str, int]]:
    keep_freed_memory()
    executor.freed_memory = FreedMemory(limit_bytes=64 * MB, check_every_s=0)
    between = gaps()
    full = executor.gfdit_memory()
    executor.free(())
    assert between
    return full, executor.gfdit_memory()


def test_freed_memory_is_bounded(kits: Callable) -> None:
    (rank,) = kits("qwen-image", num_ranks=1)._ranks
    full, bounded = rank.call("apply", fill_and_free, ())
    assert full["kept_bytes"] > (NUM_BLOCKS - 32) * MB
    assert bounded["kept_bytes"] < 16 * MB and bounded["num_given_back"] == 1
