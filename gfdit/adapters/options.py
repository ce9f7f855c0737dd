"""What a client may say about a request under ``extra_params={"gfdit": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELDS = ("deadline_ms", "slo_class", "priority", "min_sp", "max_sp", "workflow", "inputs", "edit")
EDIT_FIELDS = ("mode", "refresh_every", "full_last")
EDIT_MODES = ("exact", "own")
# What any message between processes can carry; a longer deadline is none, and a longer class is no name.
_MAX_PRIORITY = 2**31
_MAX_DEADLINE_MS = 1e12
_MAX_CLASS_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class EditOptions:
    """How an edit under a mask is made.

    ``exact``: every step computes all tokens. ``own``: a step computes those under the mask, and takes keys and
    values of the others from the last step that computed all: every ``refresh_every``-th does, and the
    ``full_last`` last ones.
    """

    mode: str = "exact"
    refresh_every: int = 3
    full_last: int = 0

    @classmethod
    def parse(cls, value: Any) -> EditOptions:
        """Raises ``ValueError`` naming the field and what is allowed."""
        if value is None:
            return cls()
        _check(isinstance(value, Mapping), "edit", f"an object with {', '.join(EDIT_FIELDS)}", value)
        if unknown := sorted(set(value) - set(EDIT_FIELDS)):
            raise ValueError(f"gfdit.edit.{unknown[0]} is unknown, allowed: {', '.join(EDIT_FIELDS)}")
        options = cls(**value)
        _check(options.mode in EDIT_MODES, "edit.mode", f"one of {', '.join(EDIT_MODES)}", options.mode)
        every, last = options.refresh_every, options.full_last
        _check(_is_integer(every) and every > 0, "edit.refresh_every", "a positive integer", every)
        _check(_is_integer(last) and last >= 0, "edit.full_last", "an integer of at least 0", last)
        return options

    def computes_all(self, step: int, num_steps: int) -> bool:
        return self.mode == "exact" or step % self.refresh_every == 0 or step >= num_steps - self.full_last


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``deadline_ms`` is relative to arrival; ``min_sp`` and ``max_sp`` bound the sequence-parallel degree.

    ``workflow`` is the name of one, with ``inputs`` by name, where the server has workflows. ``edit`` has the
    fields of :class:`EditOptions`.
    """

    deadline_ms: float | None = None
    slo_class: str = "default"
    priority: int = 0
    min_sp: int | None = None
    max_sp: int | None = None
    workflow: str | None = None
    inputs: Mapping[str, Any] | None = None
    edit: Mapping[str, Any] | None = None

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
        EditOptions.parse(options.edit)
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
