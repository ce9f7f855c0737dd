"""What a client may say about a request under ``extra_params={"gfdit": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from gfdit.core.json_fields import check_plain, has_half_pairs, shown
from gfdit.templates.budget import Precision

FIELDS = ("deadline_ms", "slo_class", "priority", "min_sp", "max_sp", "workflow", "inputs", "edit")
EDIT_MODES = ("exact", "own", "cached", "record")
# What any message between processes can carry; a longer deadline is none, and a longer class is no name.
_MAX_PRIORITY = 2**31
_MAX_DEADLINE_MS = 1e12
_MAX_CLASS_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class EditOptions:
    """How an edit under a mask is made.

    ``exact``: every step computes all tokens. ``own``: a step computes those under the mask, and takes keys and
    values of the others from the last step that computed all. ``cached``: it takes them from what was recorded of
    the template, if it was; noise that is not under the mask is then that of ``template_seed``, and a
    ``template_prompt`` other than the edit's own is what the template was recorded with. ``record``: nothing is
    edited; what steps of the template keep is recorded, of all steps or of ``steps``.

    Every ``refresh_every``-th step computes all tokens, by default every third in mode ``own`` and none in mode
    ``cached``; and so do the ``full_last`` last ones.
    """

    mode: str = "exact"
    refresh_every: int | None = None
    full_last: int = 0
    template_seed: int = 0
    template_prompt: str | None = None
    steps: tuple[int, ...] | None = None
    precision: Precision = "as is"

    @classmethod
    def parse(cls, value: Any) -> EditOptions:
        """Raises ``ValueError`` naming the field and what is allowed."""
        if value is None:
            return cls()
        names = [field.name for field in fields(cls)]
        _check(isinstance(value, Mapping), "edit", f"an object with {', '.join(names)}", value)
        if unknown := sorted(set(value) - set(names)):
            raise ValueError(f"gfdit.edit.{_name(unknown[0])} is unknown, allowed: {', '.join(names)}")
        options = cls(**value)
        _check(options.mode in EDIT_MODES, "edit.mode", f"one of {', '.join(EDIT_MODES)}", options.mode)
        every, last, seed = options.refresh_every, options.full_last, options.template_seed
        prompt, steps = options.template_prompt, options.steps
        is_every = every is None or (_is_integer(every) and every > 0)
        _check(is_every, "edit.refresh_every", "a positive integer", every)
        _check(_is_count(last), "edit.full_last", "an integer of at least 0", last)
        _check(_is_integer(seed) and 0 <= seed < 2**63, "edit.template_seed", "an integer of at least 0", seed)
        _check(prompt is None or _is_text(prompt), "edit.template_prompt", "a text", prompt)
        precisions = get_args(Precision)
        _check(
            options.precision in precisions, "edit.precision", f"one of {', '.join(precisions)}", options.precision
        )
        if steps is not None:
            are_steps = isinstance(steps, (list, tuple)) and len(steps) > 0 and all(map(_is_count, steps))
            _check(are_steps, "edit.steps", "a list of numbers of steps", steps)
            _check(options.mode == "record", "edit.steps", "given with mode record only", steps)
            options = replace(options, steps=tuple(sorted(set(steps))))
        return options

    @property
    def reads_template(self) -> bool:
        """Whether there is anything recorded, or to be."""
        return self.mode in ("cached", "record")

    def computes_all(self, step: int, num_steps: int) -> bool:
        every = self.refresh_every or (3 if self.mode == "own" else None)
        refreshes = self.mode in ("exact", "record") or (every is not None and step % every == 0)
        return refreshes or step >= num_steps - self.full_last


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
            raise ValueError(f"gfdit must be an object with {', '.join(FIELDS)}, got {shown(value)}")
        if unknown := sorted(set(value) - set(FIELDS)):
            raise ValueError(f"gfdit.{_name(unknown[0])} is unknown, allowed: {', '.join(FIELDS)}")
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
        _check(workflow is None or _is_text(workflow), "workflow", "the name of a workflow", workflow)
        _check(inputs is None or isinstance(inputs, Mapping), "inputs", "an object of inputs by name", inputs)
        check_plain(inputs, "gfdit.inputs")
        EditOptions.parse(options.edit)
        for name in ("min_sp", "max_sp"):
            degree = getattr(options, name)
            _check(degree is None or (_is_integer(degree) and degree > 0), name, "a positive integer", degree)
        if options.min_sp is not None and options.max_sp is not None:
            _check(options.min_sp <= options.max_sp, "min_sp", f"at most max_sp, {options.max_sp}", options.min_sp)
        return options


def _check(ok: bool, field: str, allowed: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"gfdit.{field} must be {allowed}, got {shown(value, 100)}")


def _is_name(value: Any) -> bool:
    return _is_text(value) and len(value) <= _MAX_CLASS_LENGTH


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not has_half_pairs(value)


def _name(name: Any) -> str:
    """Of a field that a client made up."""
    return shown(name)[1:-1]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)
