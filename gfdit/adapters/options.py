"""What a client may say about a request under ``extra_params={"gfdit": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELDS = ("deadline_ms", "slo_class", "priority", "min_sp", "max_sp", "workflow", "inputs")
# What any message between processes can carry; a longer deadline is none, and a longer class is no name.
_MAX_PRIORITY = 2**31
_MAX_DEADLINE_MS = 1e12
_MAX_CLASS_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``deadline_ms`` is relative to arrival; ``min_sp`` and ``max_sp`` bound the sequence-parallel degree.

    ``workflow`` is the name of one, with ``inputs`` by name, where the server has workflows.
    """

    deadline_ms: float | None = None
    slo_class: str = "default"
    priority: int = 0
    min_sp: int | None = None
    max_sp: int | None = None
    workflow: str | None = None
    inputs: Mapping[str, Any] | None = None

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
            options.deadline_ms is None
            or (_is_number(options.deadline_ms) and 0 < options.deadline_ms <= _MAX_DEADLINE_MS),
            "deadline_ms",
            f"a positive number of milliseconds up to {_MAX_DEADLINE_MS:g}",
            options.deadline_ms,
        )
        _check(
            _is_name(options.slo_class),
            "slo_class",
            f"a string of at most {_MAX_CLASS_LENGTH} characters",
            options.slo_class,
        )
        _check(
            _is_integer(options.priority) and abs(options.priority) <= _MAX_PRIORITY,
            "priority",
            f"an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
            options.priority,
        )
        workflow, inputs = options.workflow, options.inputs
        _check(workflow is None or isinstance(workflow, str), "workflow", "the name of a workflow", workflow)
        _check(inputs is None or isinstance(inputs, Mapping), "inputs", "an object of inputs by name", inputs)
        for name in ("min_sp", "max_sp"):
            degree = getattr(options, name)
            _check(degree is None or (_is_integer(degree) and degree > 0), name, "a positive integer", degree)
        if options.min_sp is not None and options.max_sp is not None:
            _check(options.min_sp <= options.max_sp, "min_sp", f"at most max_sp, {options.max_sp}", options.min_sp)
        return options


def _check(ok: bool, field: str, allowed: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"gfdit.{field} must be {allowed}, got {value!r:.100}")


def _is_name(value: Any) -> bool:
    """Half of a surrogate pair, which JSON can escape, is no character: it cannot be sent as UTF-8."""
    return (
        isinstance(value, str)
        and len(value) <= _MAX_CLASS_LENGTH
        and not any("\ud800" <= character <= "\udfff" for character in value)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)
