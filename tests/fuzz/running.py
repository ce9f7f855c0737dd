"""Runs targets: every input with a limit on what it takes, targets one by one in processes of their own."""

from __future__ import annotations

import mmap
import os
import pickle
import random
import re
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.limits import TakesTooLongError, bound_memory, bounded_time, watching_time
from tests.fuzz.targets import Target

STRUCTURED_SHARE = 0.02
MAX_STRUCTURED = 200
"""Of a target's inputs, from Hypothesis: to make one takes it a hundred times as long as to change one. Those that
are accepted are changed from then on like the corpus."""
BATCH = 200  # of Hypothesis, which remembers what it has made
SILENT_S = 600.0
"""Of a target's process: it hangs where Python cannot interrupt it."""
MAX_FAILURES = 20  # of a target that are kept; of each kind one
_SHARED_BYTES = 1 << 20


@dataclass
class Tally:
    """What became of a target's inputs. ``failures`` are of each kind the first: what is wrong, and the input."""

    num_inputs: int = 0
    num_accepted: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    max_ms: float = 0.0  # of processor time
    failures: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    @property
    def num_rejected(self) -> int:
        return self.num_inputs - self.num_accepted - self.num_failed

    def fail(self, wrong: str, data: bytes) -> None:
        self.num_failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.setdefault(re.sub(r"\d+|'.*'|\".*\"|0x\S*", "_", wrong), (wrong, data))


def try_inputs(
    target: Target, num_inputs: int, first_seed: int, on_input: Callable[[bytes], object] = lambda data: None
) -> Tally:
    """The corpus, and so many inputs in all; the same ones for the same seed. In the main thread."""
    tally = Tally()
    begin_s = time.monotonic()

    pool = list(target.seeds)

    def one(data: bytes, *, keep: bool = False) -> None:
        on_input(data)
        tally.num_inputs += 1
        start_s = time.process_time()
        try:
            with bounded_time():
                accepted, wrong = target.try_one(data)
        except TakesTooLongError as error:
            accepted, wrong = False, str(error)
        ms = 1e3 * (time.process_time() - start_s)
        tally.max_ms = max(tally.max_ms, ms)
        if wrong:
            tally.fail(wrong, data)
        else:
            tally.num_accepted += accepted
            if keep and accepted:
                pool.append(data)

    with watching_time():
        for data in target.seeds:
            one(data)
        num_structured = min(MAX_STRUCTURED, round(STRUCTURED_SHARE * num_inputs))
        if target.strategy is None:
            num_structured = 0
        for number in range(0, num_structured, BATCH):
            _structured(target, min(BATCH, num_structured - number), first_seed + number, partial(one, keep=True))
        draw = random.Random(f"{target.name} {first_seed}")
        while tally.num_inputs < num_inputs:
            one(target.mutate(draw, pool))
    tally.seconds = time.monotonic() - begin_s
    return tally


def _structured(target: Target, num_inputs: int, number: int, one: Callable[[bytes], None]) -> None:
    assert target.strategy is not None

    @seed(number)
    @settings(
        max_examples=num_inputs,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.strategy())
    def each(data: bytes) -> None:
        one(data)

    each()


def in_process(target: Target, num_inputs: int, first_seed: int) -> Tally:
    """:func:`try_inputs` in a child that may crash or hang: then its last input is the failure."""
    last = mmap.mmap(-1, _SHARED_BYTES)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            bound_memory()
            result = pickle.dumps(try_inputs(target, num_inputs, first_seed, lambda data: _note(last, data)))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(result)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = b"".join(_until_silent(pipe.fileno(), last, child))
    _, status = os.waitpid(child, 0)
    if told:
        found: Tally = pickle.loads(told)
        return found
    tally = Tally(num_inputs=_STATE.unpack_from(last)[0])
    tally.fail(f"the process ended with status {status}", _noted(last))
    return tally


_STATE = struct.Struct("<QQ")  # number of inputs, bytes of the last one


def _note(last: mmap.mmap, data: bytes) -> None:
    number, _ = _STATE.unpack_from(last)
    _STATE.pack_into(last, 0, number + 1, len(data))
    if _STATE.size + len(data) <= _SHARED_BYTES:
        last[_STATE.size : _STATE.size + len(data)] = data


def _noted(last: mmap.mmap) -> bytes:
    _, num_bytes = _STATE.unpack_from(last)
    return last[_STATE.size : _STATE.size + num_bytes]


def _until_silent(pipe: int, last: mmap.mmap, child: int) -> Iterator[bytes]:
    """What the child writes. One that makes no progress for :data:`SILENT_S` is ended."""
    import select

    seen, since_s = -1, time.monotonic()
    while True:
        if select.select([pipe], [], [], 5.0)[0]:
            if not (data := os.read(pipe, 1 << 16)):
                return
            yield data
        elif (number := _STATE.unpack_from(last)[0]) != seen:
            seen, since_s = number, time.monotonic()
        elif time.monotonic() > since_s + SILENT_S:
            os.kill(child, signal.SIGKILL)
