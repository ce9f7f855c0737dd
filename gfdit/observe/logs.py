"""One way of logging in every process of a server: vLLM's, as its environment variables configure it.

The engine's process reads vLLM's configuration (:mod:`gfdit.omni.vllm_logging`) and hands it to those that it
starts, since the control process does without vLLM. Everywhere ``gfdit`` loggers are under vLLM's, so level,
format and destination are those of ``vllm`` and ``vllm_omni``; a configuration that names ``gfdit`` has its way.

What is said at WARNING or above in like words more than ``BURST`` times within ``WINDOW_S`` is counted, and one
line then says how often. Nothing is held back below that.
"""

from __future__ import annotations

import copy
import logging
import logging.config
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

BURST = 3
WINDOW_S = 30.0
MAX_KINDS = 256
_VLLM = "vllm"
_OURS = "gfdit"
_FORMATTERS = {"NewLineFormatter": "LineFormatter", "ColoredFormatter": "ColouredFormatter"}
_COLOURS = {"DEBUG": 37, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}
_GREY, _PLAIN = "\033[90m", "\033[0m"
# Names of requests, tasks and files, numbers: what lines that say the same differ in.
_DETAIL = re.compile(r"[\d/]")


def log_as_vllm(config: Mapping[str, Any], process: str) -> None:
    """To be called first in a process that has no vLLM, or not yet; ``process`` is what log lines call it.

    ``config`` is for ``logging.config.dictConfig``; if it is empty, vLLM is told to configure nothing, and neither
    is there anybody else in such a process: then everything from INFO on goes to standard error. Raises
    ``ValueError`` for a configuration that cannot be used.
    """
    multiprocessing.current_process().name = process
    if config:
        _configure(_without_vllm(config))
    else:
        words = "%(levelname)s %(asctime)s [%(processName)s %(name)s] %(message)s"
        logging.basicConfig(level=logging.INFO, format=words)
    put_under_vllm()


def put_under_vllm() -> None:
    """Have ``gfdit`` loggers do as vLLM's does, and say repeated faults at a bounded rate; any number of times."""
    ours, vllm = logging.getLogger(_OURS), logging.getLogger(_VLLM)
    ours.parent = vllm
    for logger in (logging.getLogger(), vllm, ours):
        for handler in logger.handlers:
            if not any(isinstance(one, RateLimit) for one in handler.filters):
                handler.addFilter(_limit)


def _configure(config: dict[str, Any]) -> None:
    """As ``dictConfig``, for the loggers that it names and those above them.

    It would also reset those below, and for each of them the caches of all: vLLM has more than a thousand, so that
    this took a third of a second of every worker's start.
    """
    manager = logging.getLogger().manager
    known = manager.loggerDict
    named = tuple(f"{name}." for name in config.get("loggers", {}))
    shown = {name: one for name, one in known.items() if any(below.startswith(f"{name}.") for below in named)}
    manager.loggerDict = shown.copy()
    try:
        logging.config.dictConfig(config)
    finally:
        known |= {name: one for name, one in manager.loggerDict.items() if shown.get(name) is not one}
        manager.loggerDict = known
    root = logging.getLogger()
    root.setLevel(root.level)  # clears the caches of all, once


def _without_vllm(config: Mapping[str, Any]) -> dict[str, Any]:
    """With formatters of this module for vLLM's, whose import would bring all of vLLM and torch."""
    changed = copy.deepcopy(dict(config))
    for formatter in changed.get("formatters", {}).values():
        for key in ("class", "()"):
            module, _, name = str(formatter.get(key, "")).rpartition(".")
            if module.partition(".")[0] == _VLLM and name in _FORMATTERS:
                formatter[key] = f"{__name__}.{_FORMATTERS[name]}"
    return changed


class LineFormatter(logging.Formatter):
    """As vLLM's ``NewLineFormatter``: every line of a message begins alike. And it names the process."""

    def __init__(
        self, fmt: str | None = None, datefmt: str | None = None, style: Literal["%", "{", "$"] = "%"
    ) -> None:
        super().__init__(fmt, datefmt, style)

    def format(self, record: logging.LogRecord) -> str:
        record.fileinfo = record.filename
        text = super().format(record)
        lead = f"({record.processName} pid={record.process}) "
        beginning = text.partition(record.message)[0] if record.message else ""
        return lead + text.replace("\n", f"\n{lead}{beginning}")


class ColouredFormatter(LineFormatter):
    """As vLLM's ``ColoredFormatter``: time and place in grey, the level in its colour."""

    def __init__(
        self, fmt: str | None = None, datefmt: str | None = None, style: Literal["%", "{", "$"] = "%"
    ) -> None:
        for part in ("%(asctime)s", "[%(fileinfo)s:%(lineno)d]"):
            fmt = fmt and fmt.replace(part, f"{_GREY}{part}{_PLAIN}")
        super().__init__(fmt, datefmt, style)

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname
        if level in _COLOURS:
            record.levelname = f"\033[{_COLOURS[level]}m{level}{_PLAIN}"
        try:
            return super().format(record)
        finally:
            record.levelname = level


@dataclass(slots=True)
class _Said:
    """Of lines alike: since when, how often they were said, how often not, and the last of these.

    Of that one not the record: it would keep a traceback alive, and with it what a failed task had on a device.
    """

    since_s: float
    num_said: int = 0
    num_held: int = 0
    last: tuple[str, int, str] = ("", 0, "")


class RateLimit(logging.Filter):
    """Of handlers, which share it: each record of ``gfdit`` is judged once, however many of them it comes to."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._call_later = call_later or _call_later
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], _Said] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name.partition(".")[0] != _OURS:
            return True
        judged: bool | None = getattr(record, "is_said", None)
        if judged is None:
            judged = record.is_said = self._judge(record)
        return judged

    def _judge(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        kind = record.name, record.levelno, _alike(text)
        now_s = self._clock()
        with self._lock:
            said = self._kinds.get(kind)
            if said is None or now_s - said.since_s >= WINDOW_S:
                if said is None and len(self._kinds) >= MAX_KINDS:
                    self._kinds = {key: one for key, one in self._kinds.items() if one.num_held}
                held = 0 if said is None else said.num_held  # of which the timer is about to tell
                self._kinds[kind] = said = _Said(now_s, 0, held, (record.pathname, record.lineno, text))
            if said.num_said < BURST:
                said.num_said += 1
                return True
            said.num_held, said.last = said.num_held + 1, (record.pathname, record.lineno, text)
            is_first = said.num_held == 1
        if is_first:
            self._call_later(WINDOW_S, lambda: self._tell(kind))
        return False

    def _tell(self, kind: tuple[str, int, str]) -> None:
        """Say how many were held back."""
        with self._lock:
            said = self._kinds[kind]
            number, (path, line, text) = said.num_held, said.last
            said.num_held = 0
        (name, level, _), words = kind, f"{number} more in the last {WINDOW_S:.0f} s, the last of them: %s"
        record = logging.LogRecord(name, level, path, line, words, (text,), None)
        record.is_said = True
        logging.getLogger(name).handle(record)


def _alike(text: str) -> str:
    return " ".join([word for word in text.split() if not _DETAIL.search(word)])


def _call_later(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


_limit = RateLimit()
