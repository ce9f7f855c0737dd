"""Threads and loops that do not end, or lose what they were given, without a word.

A function that raises on a thread of its own ends that thread, and nobody who waits for it hears so. Threads are
started by :func:`start_guarded`; one turn of a loop that should outlive its mistakes runs inside :func:`guarded`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("gfdit.guard")

ErrorHandler = Callable[[BaseException], None]


@contextmanager
def guarded(what: str, on_error: ErrorHandler) -> Iterator[None]:
    """Log what the block raises, with its traceback, as a failure of ``what``, and hand it to ``on_error``.

    That is where whoever waits for the block is told. What ``on_error`` raises itself goes on to the guard
    outside. ``SystemExit`` is caught, too, since it ends a thread without a trace; ``KeyboardInterrupt`` is not.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        logger.exception("%s failed", what)
        on_error(error)


def start_guarded(run: Callable[[], None], *, name: str, on_error: ErrorHandler) -> threading.Thread:
    """Start a daemon thread that calls ``run``, and ``on_error`` in that thread should it end by an error."""

    def main() -> None:
        with guarded(f"thread {name}", on_error):
            run()

    thread = threading.Thread(target=main, name=name, daemon=True)
    thread.start()
    return thread
