"""Results are delivered one after the other by a thread, of which one more may wait."""

from __future__ import annotations

import threading
from contextlib import nullcontext

from gfdit.runtime.deliveries import DeliveryThread
from tests.support.waiting import HANG_S, wait_until


def test_one_waits_while_another_is_delivered_and_a_third_holds_up_who_brings_it() -> None:
    errors: list[BaseException] = []
    deliveries = DeliveryThread(nullcontext, errors.append)
    may_end = threading.Event()
    done: list[int] = []

    def deliver(number: int) -> None:
        assert may_end.wait(HANG_S)
        done.append(number)

    began = threading.Event()

    def first() -> None:
        began.set()
        deliver(1)

    deliveries.put(first)
    assert began.wait(HANG_S)
    deliveries.put(lambda: deliver(2))
    third = threading.Thread(target=deliveries.put, args=(lambda: deliver(3),), daemon=True)
    third.start()
    third.join(0.2)
    assert third.is_alive() and not done
    may_end.set()
    third.join(HANG_S)
    deliveries.drain()
    assert done == [1, 2, 3] and not errors
    deliveries.close()


def test_a_thread_that_ends_is_told_of() -> None:
    errors: list[BaseException] = []
    deliveries = DeliveryThread(nullcontext, errors.append)

    def fails() -> None:
        raise KeyError("a mistake")

    deliveries.put(fails)
    wait_until(lambda: bool(errors), "the thread's end is told")
