"""How log lines look, where they go, and that a fault that repeats itself does not fill the log."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gfdit.observe import logs
from gfdit.observe.logs import BURST, WINDOW_S, LineFormatter, RateLimit, log_as_vllm, put_under_vllm

# As vLLM's own, with a stream that a test can read.
VLLM: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "vllm": {
            "class": "vllm.logging_utils.NewLineFormatter",
            "datefmt": "%m-%d",
            "format": "PREFIX %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s",
        },
        "vllm_color": {
            "class": "vllm.logging_utils.ColoredFormatter",
            "format": "%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s",
        },
    },
    "handlers": {
        "vllm": {
            "class": "logging.StreamHandler",
            "formatter": "vllm",
            "level": "INFO",
            "stream": "ext://sys.stdout",
        }
    },
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """Of standard output; all loggers are put back afterwards."""
    process, before = multiprocessing.current_process().name, _state()
    yield lambda: capsys.readouterr().out.splitlines()
    multiprocessing.current_process().name = process
    for logger, values in before.items():
        logger.__dict__.update(values)


def _state() -> dict[logging.Logger, dict[str, Any]]:
    loggers = [logging.getLogger(name) for name in ("vllm", "gfdit", "gfdit.test", "")]
    return {
        logger: {
            "handlers": list(logger.handlers),
            "parent": logger.parent,
            "propagate": logger.propagate,
            "level": logger.level,
            "_cache": {},
        }
        for logger in loggers
    }


def test_gfdit_logs_as_vllm_is_told_to_without_importing_it(lines: Callable[[], list[str]]) -> None:
    had_vllm = "vllm" in sys.modules
    log_as_vllm(VLLM, "gfdit-test")
    logger = logging.getLogger("gfdit.test")
    logger.debug("too quiet")
    logger.info("r1 is\nhere")
    lead = f"(gfdit-test pid={os.getpid()}) PREFIX INFO "
    first, second = lines()
    assert first.startswith(lead) and second.startswith(lead)
    assert "[test_logs.py:" in first and first.endswith("] r1 is") and second.endswith("] here")
    assert ("vllm" in sys.modules) == had_vllm


def test_a_traceback_is_kept_line_by_line(lines: Callable[[], list[str]]) -> None:
    log_as_vllm(VLLM, "gfdit-test")
    try:
        raise RuntimeError("a bug")
    except RuntimeError:
        logging.getLogger("gfdit.test").exception("r1 failed")
    _, first, *_, last = said = lines()
    assert first.endswith("Traceback (most recent call last):") and last.endswith("RuntimeError: a bug")
    assert all(line.startswith("(gfdit-test pid=") for line in said)


def test_a_configuration_that_names_gfdit_has_its_way(lines: Callable[[], list[str]]) -> None:
    own = {"gfdit": {"level": "DEBUG", "handlers": ["vllm"], "propagate": False}}
    handlers = {"vllm": {**VLLM["handlers"]["vllm"], "level": "DEBUG", "formatter": "vllm_color"}}
    log_as_vllm({**VLLM, "handlers": handlers, "loggers": {**VLLM["loggers"], **own}}, "gfdit-test")
    logging.getLogger("gfdit.test").debug("r1 is here")
    (line,) = lines()
    assert "\033[37mDEBUG\033[0m" in line and "\033[90m[test_logs.py:" in line


def test_a_formatter_of_the_users_own_is_used(lines: Callable[[], list[str]]) -> None:
    formatters = {"vllm": {"format": "%(processName)s|%(name)s|%(message)s"}}
    log_as_vllm({**VLLM, "formatters": formatters}, "gfdit-test")
    logging.getLogger("gfdit.test").info("r1")
    assert lines() == ["gfdit-test|gfdit.test|r1"]


def test_loggers_below_and_beside_stay_as_they_are(lines: Callable[[], list[str]]) -> None:
    """In a worker they are vLLM's, which has just made them."""
    below, beside = logging.getLogger("vllm.below"), logging.getLogger("beside.vllm")
    below.setLevel(logging.ERROR)
    assert not below.isEnabledFor(logging.WARNING)
    assert logging.getLogger("vllm.other").isEnabledFor(logging.WARNING)
    try:
        log_as_vllm(
            {"version": 1, "loggers": {"vllm": {"level": "ERROR"}, "vllm.new.one": {"level": "INFO"}}}, "x"
        )
        assert below.level == logging.ERROR and not (below.disabled or beside.disabled)
        assert logging.getLogger("vllm.below") is below and below.parent is logging.getLogger("vllm")
        # What they have found out about levels is forgotten.
        assert not logging.getLogger("vllm.other").isEnabledFor(logging.WARNING)
        assert logging.getLogger("vllm.new.one").parent is logging.getLogger("vllm")
    finally:
        below.setLevel(logging.NOTSET)


class Kept(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Limited:
    """Two handlers with one limit, a clock, and what is to happen later."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        limit = RateLimit(lambda: self.now_s, lambda seconds, call: self.later.append((seconds, call)))
        self.logger = logging.getLogger("gfdit.limited")
        self.logger.propagate = False
        self.logger.setLevel(logging.DEBUG)
        self.said: list[list[str]] = [[], []]
        self.logger.handlers = []
        for said in self.said:
            handler = Kept(said)
            handler.addFilter(limit)
            self.logger.addHandler(handler)

    def take(self) -> list[str]:
        one, other = self.said
        assert one == other, "a record is judged once for all handlers"
        taken = list(one)
        one.clear()
        other.clear()
        return taken


def test_a_fault_that_repeats_itself_is_said_at_once_and_then_counted() -> None:
    limited = Limited()
    for number in range(BURST + 7):
        limited.logger.error("rank %d: r%d/denoise/%d failed", number % 2, number, 3 * number)
    assert len(limited.take()) == BURST
    ((seconds, tell),) = limited.later
    assert seconds == WINDOW_S
    limited.now_s += WINDOW_S
    tell()
    last = f"rank {(BURST + 6) % 2}: r{BURST + 6}/denoise/{3 * (BURST + 6)} failed"
    assert limited.take() == [f"7 more in the last {WINDOW_S:.0f} s, the last of them: {last}"]
    limited.logger.error("rank 1: r1/denoise/1 failed")
    assert limited.take() == ["rank 1: r1/denoise/1 failed"], "what comes later is said again"
    assert len(limited.later) == 1


def test_what_is_held_back_just_before_the_next_window_is_told_too() -> None:
    limited = Limited()
    for _ in range(BURST + 1):
        limited.logger.error("rank 1 failed")
    limited.now_s += WINDOW_S
    for _ in range(BURST + 2):
        limited.logger.error("rank 1 failed")
    assert len(limited.take()) == 2 * BURST
    ((_, tell),) = limited.later
    tell()
    assert [text.partition(" ")[0] for text in limited.take()] == ["3"]


def test_other_faults_levels_and_what_is_no_fault_are_not_held_back() -> None:
    limited = Limited()
    for _ in range(BURST + 1):
        limited.logger.error("rank 1 failed")
        limited.logger.info("rank 1 is back")
    limited.logger.error("rank 1 is lost")
    limited.logger.warning("rank 1 failed")
    assert limited.take().count("rank 1 is back") == BURST + 1
    limited.logger.error("rank 2 is lost")
    assert limited.take() == ["rank 2 is lost"]


def test_kinds_of_faults_are_bounded() -> None:
    limited = Limited()
    (limit,) = limited.logger.handlers[0].filters
    assert isinstance(limit, RateLimit)
    for number in range(3 * logs.MAX_KINDS):
        limited.logger.error("%s", "x" * (number + 1))
    assert len(limit._kinds) <= logs.MAX_KINDS


def test_what_is_held_back_keeps_no_traceback_alive() -> None:
    class Large:
        num_alive = 0

        def __init__(self) -> None:
            Large.num_alive += 1

        def __del__(self) -> None:
            Large.num_alive -= 1

    def fail() -> None:
        large = Large()
        raise RuntimeError(str(type(large)))

    limited = Limited()
    for _ in range(BURST + 2):
        try:
            fail()
        except RuntimeError as error:
            limited.logger.error("rank 0: %s", error, exc_info=error)
    assert len(limited.later) == 1 and Large.num_alive == 0


def test_the_limit_is_put_on_once(lines: Callable[[], list[str]]) -> None:
    log_as_vllm(VLLM, "gfdit-test")
    put_under_vllm()
    put_under_vllm()
    (handler,) = logging.getLogger("vllm").handlers
    assert len(handler.filters) == 1 and isinstance(handler.formatter, LineFormatter)
