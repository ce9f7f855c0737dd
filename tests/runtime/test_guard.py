"""What becomes of an error that a thread, or one turn of a loop, ends by."""

from __future__ import annotations

import logging
import queue
import sys

import pytest

from gfdit.runtime.guard import guarded, start_guarded


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3)])
def test_a_thread_that_ends_by_an_error_says_so(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise error

    told: queue.Queue[BaseException] = queue.Queue()
    thread = start_guarded(run, name="gfdit-test", on_error=told.put)
    assert told.get(timeout=120) is error
    thread.join(120)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "gfdit-test" in record.message
    assert record.exc_info is not None and record.exc_info[1] is error, "with its traceback"


def test_a_thread_that_just_ends_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    start_guarded(lambda: None, name="gfdit-test", on_error=told.append).join(120)
    assert not told and not caplog.records


def test_a_loop_outlives_its_turns_and_the_handler_may_end_it() -> None:
    failed: list[str] = []

    def on_error(error: BaseException) -> None:
        failed.append(str(error))
        if len(failed) == 2:
            raise RuntimeError("too many") from error

    with pytest.raises(RuntimeError, match="too many"):
        for turn in range(5):
            with guarded("a turn", on_error):
                raise ValueError(turn)
    assert failed == ["0", "1"]


def test_ctrl_c_is_not_an_error_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), guarded("a turn", lambda _: sys.exit("handled")):
        raise KeyboardInterrupt
