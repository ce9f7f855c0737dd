"""What a worker keeps of the memory it has freed: much, but no more than it may."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from gfdit.runtime.host_memory import FreedMemory, HostMemory, keep_freed_memory

MB = 1 << 20
NUM_BLOCKS = 256
LIMIT_BYTES = 64 * MB

pytestmark = pytest.mark.skipif(
    FreedMemory().measure().in_use_bytes == 0, reason="this C library cannot tell what it keeps: nothing is kept"
)


@pytest.fixture
def in_new_process() -> Iterator[Callable]:
    """Settings of the C library are for good, and what others have freed is in the way."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result(timeout=120)


def gaps(num_blocks: int = NUM_BLOCKS) -> list[bytes]:
    """Free blocks of 1 MB each, between something small that lives as long as the returned list."""
    blocks, between = [], []
    for _ in range(num_blocks):
        blocks.append(bytearray(b"x") * MB)
        between.append(b"y" * 1000)
    return between


def fill_and_free(limit_bytes: int, check_every_s: float) -> list[HostMemory]:
    """Of a worker: when it starts, has freed blocks, has asked for the bound, has done both again."""
    keep_freed_memory()
    freed = FreedMemory(limit_bytes, check_every_s)
    found, living = [freed.measure()], []
    for _ in range(2):
        living.append(gaps())
        found.append(freed.measure())
        freed.bound()
        found.append(freed.measure())
    return found


def hold(limit_bytes: int) -> list[HostMemory]:
    """Of a process that has freed nothing: when it starts, and when it has taken much and asked for the bound."""
    keep_freed_memory()
    freed = FreedMemory(limit_bytes, check_every_s=0)
    found, blocks = [freed.measure()], []
    for _ in range(NUM_BLOCKS):
        blocks.append(bytearray(b"x") * MB)
    freed.bound()
    return [*found, freed.measure()]


def test_more_than_the_limit_is_given_back(in_new_process: Callable) -> None:
    start, full, bounded, full_again, bounded_again = in_new_process(fill_and_free, LIMIT_BYTES, 0.0)
    assert start.kept_bytes < 16 * MB
    for memory in (full, full_again):
        assert memory.kept_bytes > (NUM_BLOCKS - 32) * MB, "it is not kept at all"
    for number, memory in enumerate((bounded, bounded_again), 1):
        assert memory.kept_bytes < 16 * MB and memory.num_given_back == number
        assert memory.resident_bytes < start.resident_bytes + 32 * MB


def test_less_than_the_limit_is_kept(in_new_process: Callable) -> None:
    *_, last = in_new_process(fill_and_free, 4 * NUM_BLOCKS * MB, 0.0)
    assert last.num_given_back == 0 and last.kept_bytes > (NUM_BLOCKS - 32) * MB


def test_it_is_not_looked_at_all_the_time(in_new_process: Callable) -> None:
    *_, last = in_new_process(fill_and_free, LIMIT_BYTES, 3600.0)
    assert last.num_given_back == 1, "once, the first time"


def test_what_is_in_use_is_not_kept(in_new_process: Callable) -> None:
    start, full = in_new_process(hold, LIMIT_BYTES)
    assert full.num_given_back == 0 and full.kept_bytes < 32 * MB
    assert full.in_use_bytes - start.in_use_bytes >= NUM_BLOCKS * MB


def fill_and_free_in_threads(num_threads: int) -> list[HostMemory]:
    """Of a worker: when it starts, and while threads live that have freed all they had."""
    keep_freed_memory()
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    all_there, may_end = threading.Barrier(num_threads + 1), threading.Event()

    def work() -> None:
        blocks = [library.malloc(MB) for _ in range(50)]
        for block in blocks:
            ctypes.memset(block, 1, MB)
        all_there.wait()
        for block in blocks:
            library.free(block)
        all_there.wait()
        may_end.wait()

    found = [FreedMemory().measure()]
    for thread in (threads := [threading.Thread(target=work) for _ in range(num_threads)]):
        thread.start()
    for _ in range(2):
        all_there.wait()
    found.append(FreedMemory().measure())
    may_end.set()
    for thread in threads:
        thread.join()
    return found


def test_what_threads_have_freed_is_given_back_too(in_new_process: Callable) -> None:
    start, freed = in_new_process(fill_and_free_in_threads, 8)
    assert freed.resident_bytes < start.resident_bytes + 16 * MB
