"""What a client may say about a request under ``extra_params={"gfdit": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELDS = ("deadline_ms", "slo_class", "priority", "max_sp")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``deadline_ms`` is relative to arrival; ``max_sp`` bounds the sequence-parallel degree."""

    deadline_ms: float | None = None
    slo_class: str = "default"
    priority: int = 0
    max_sp: int | None = None

    @classmethod
    def parse(cls, value: Any) -> RequestOptions:
        """Check what a client sent. Raises ``ValueError`` naming the field and what is allowed."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ValueError(f"gfdit must be an object with {', '.join(FIELDS)}, got {value!r}")
        if unknown := sorted(set(value) - set(FIELDS)):
            raise ValueError(f"gfdit.{unknown[0]} is unknown, allowed: {', '.join(FIELDS)}")
        options = cls(**value)
        _check(
            options.deadline_ms is None or (_is_number(options.deadline_ms) and options.deadline_ms > 0),
            "deadline_ms",
            "a positive number of milliseconds",
            options.deadline_ms,
        )
        _check(isinstance(options.slo_class, str), "slo_class", "a string", options.slo_class)
        _check(_is_integer(options.priority), "priority", "an integer", options.priority)
        _check(
            options.max_sp is None or (_is_integer(options.max_sp) and options.max_sp > 0),
            "max_sp",
            "a positive integer",
            options.max_sp,
        )
        return options


def _check(ok: bool, field: str, allowed: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"gfdit.{field} must be {allowed}, got {value!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and value == value and abs(value) != float("inf")
