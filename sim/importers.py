"""Logs of production services as requests: GenTD26, and any CSV of the BurstGPT or Azure kind.

GenTD26 is ``lora_request_trace.csv`` of github.com/alibaba/clusterdata, cluster-trace-v2026-GenAI (Lin et al.,
"Understanding Diffusion Model Serving in Production", SoCC 2025).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from gfdit.core.json_fields import one_line
from gfdit.core.tasks import Shape
from gfdit.sim.log_traces import LoggedRequest
from gfdit.sim.shares import shape_of
from gfdit.sim.trace import MAX_STEPS

T = TypeVar("T")

FIELDS = (
    *("arrival", "model", "steps", "size", "height", "width", "frames"),
    *("images", "class", "deadline"),
)
"""What a column may say. ``size`` is one of :func:`shape_of`, ``deadline`` seconds from the arrival."""

MAX_IMAGES = 1000
OTHER_MODELS = "*"


@dataclass(frozen=True, slots=True)
class Condition:
    """Rows whose ``column`` has this ``value``, or any but this."""

    column: str
    value: str
    equal: bool = True

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises ``ValueError`` unless it is COLUMN=VALUE or COLUMN!=VALUE."""
        column, sign, value = text.partition("=")
        equal = not column.endswith("!")
        column = column if equal else column[:-1]
        if not sign or not column:
            raise ValueError(f"a condition on rows must be COLUMN=VALUE or COLUMN!=VALUE, got {text!r}")
        return cls(column, value, equal)


@dataclass(frozen=True, slots=True)
class LogFormat:
    """``columns`` are by field (:data:`FIELDS`); rows are kept that meet all conditions of ``where``.

    ``time_format`` is one of ``strptime``; without, times are seconds or ISO 8601. ``model_names`` are models by
    what the log calls them, with ``*`` for all others.
    """

    columns: Mapping[str, str]
    where: tuple[Condition, ...] = ()
    time_format: str | None = None
    model_names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [field for field in self.columns if field not in FIELDS]:
            raise ValueError(f"a log has no field {unknown[0]!r}, known: {', '.join(FIELDS)}")
        if "arrival" not in self.columns:
            raise ValueError("which column is the time of arrival? Give arrival=COLUMN")
        if ("height" in self.columns) != ("width" in self.columns):
            raise ValueError("height and width are needed together")
        if "size" in self.columns and "height" in self.columns:
            raise ValueError("a log has either a size or height and width")


GENTD26 = LogFormat(
    MappingProxyType({"arrival": "gmt_create", "steps": "num_inference_steps"}),
    where=(Condition("predict_type", "TXT_2_IMG"), Condition("num_inference_steps", "", equal=False)),
)
FORMATS: Mapping[str, LogFormat | None] = MappingProxyType({"csv": None, "gentd26": GENTD26})


def read_log(path: str | Path, log: LogFormat, models: Sequence[str]) -> list[LoggedRequest]:
    """The requests of a CSV file with a header, in order of time, at equal times in that of the file.

    A request for several images is as many requests. An empty cell says nothing. Raises ``ValueError`` for a
    column that is not there, naming those that are, and for a cell that cannot be read or a model that is not one
    of ``models``, naming file, line and column and what is allowed.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            header = reader.fieldnames or []
            for column in (*log.columns.values(), *(condition.column for condition in log.where)):
                if column not in header:
                    raise ValueError(
                        f"{path}: no column {column!r}, there are: {one_line(', '.join(header)) or 'none'}"
                    )
            requests = list(_requests(reader, path, log, models))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{reader.line_num + 1}: not CSV: {error}") from error
    return sorted(requests, key=lambda request: request.arrival_s)


def spread_ties(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Of ``requests`` in order of time, those of one second at even distances within it, in their order.

    Where all times are whole seconds the log's clock has rounded them. Where they are not, equal times are kept.
    """
    if any(request.arrival_s != math.floor(request.arrival_s) for request in requests):
        return list(requests)
    spread: list[LoggedRequest] = []
    for second_s, group in groupby(requests, key=lambda request: request.arrival_s):
        tied = list(group)
        spread += (replace(request, arrival_s=second_s + index / len(tied)) for index, request in enumerate(tied))
    return spread


def _requests(
    reader: csv.DictReader[str], path: str | Path, log: LogFormat, models: Sequence[str]
) -> Iterator[LoggedRequest]:
    for values in reader:
        if all(((values[one.column] or "") == one.value) == one.equal for one in log.where):
            row = _Row(values, f"{path}:{reader.line_num}", log)
            yield from [row.request(models)] * row.number("images", 1, MAX_IMAGES)


@dataclass(frozen=True, slots=True)
class _Row:
    values: Mapping[str, str | None]
    where: str
    log: LogFormat

    def request(self, models: Sequence[str]) -> LoggedRequest:
        """Raises ``ValueError`` for a cell that cannot be read."""
        arrival_s = self.read("arrival", lambda text: _time_s(text, self.log.time_format))
        if arrival_s is None:
            raise self.error("arrival", "must be a time, it is empty")
        return LoggedRequest(
            arrival_s,
            self.read("model", lambda text: self.model(text, models)),
            self.shape(),
            self.number("steps", 0, MAX_STEPS) or None,
            self.read("class", str),
            self.read("deadline", _positive),
        )

    def shape(self) -> Shape | None:
        if "size" in self.log.columns:
            return self.read("size", shape_of)
        if "height" not in self.log.columns:
            return None
        height, width = self.number("height", 0, MAX_SIDE), self.number("width", 0, MAX_SIDE)
        return Shape(height, width, self.number("frames", 1, MAX_SIDE)) if height and width else None

    def model(self, text: str, models: Sequence[str]) -> str:
        names = self.log.model_names
        if (model := names.get(text, names.get(OTHER_MODELS, text))) not in models:
            known = ", ".join(models)
            raise ValueError(f"must be a model with costs ({known}) or have a name of one given, got {text!r}")
        return model

    def number(self, field: str, absent: int, largest: int) -> int:
        found = self.read(field, lambda text: _whole(text, largest))
        return absent if found is None else found

    def read(self, field: str, read: Callable[[str], T]) -> T | None:
        """None where there is no such column, or nothing in it."""
        column = self.log.columns.get(field)
        text = "" if column is None else (self.values[column] or "").strip()
        if not text:
            return None
        try:
            return read(text)
        except ValueError as error:
            raise self.error(field, str(error)) from error

    def error(self, field: str, message: str) -> ValueError:
        return ValueError(f"{self.where}: column {self.log.columns[field]!r} {message}")


MAX_SIDE = 100_000  # of pixels or frames


def _time_s(text: str, time_format: str | None) -> float:
    """Seconds on some clock; a time of day without a zone is one of UTC."""
    if time_format is not None:
        try:
            return _utc(datetime.strptime(text, time_format)).timestamp()
        except ValueError:
            raise ValueError(f"must be a time of the form {time_format}, got {text!r}") from None
    try:
        seconds = float(text)
    except ValueError:
        try:
            return _utc(datetime.fromisoformat(text.replace("/", "-"))).timestamp()
        except ValueError:
            raise ValueError(
                f"must be seconds or a time such as 2024-11-15 16:57:50.25, got {text!r}; there are time formats"
            ) from None
    if not math.isfinite(seconds):
        raise ValueError(f"must be a finite number of seconds, got {text!r}")
    return seconds


def _utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _whole(text: str, largest: int) -> int:
    """Also written as ``30.0``."""
    number = _float(text)
    if not 1 <= number <= largest or number != int(number):
        raise ValueError(f"must be a whole number from 1 to {largest}, got {text!r}")
    return int(number)


def _positive(text: str) -> float:
    number = _float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"must be a positive number, got {text!r}")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
