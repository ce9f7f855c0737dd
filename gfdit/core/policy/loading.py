"""Find a policy by name, module or file, and give it its command-line arguments.

Everything that can be wrong here is the user's mistake: each ends in a ``ValueError`` of one line.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from gfdit.core.policy import Policy
from gfdit.core.policy.admission import with_admission

GROUP = "gfdit.policies"
DEFAULT_POLICY = "triage"
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class PolicyParameter:
    """One constructor argument; ``default`` is :data:`REQUIRED` if it has none."""

    name: str
    type: Any
    default: Any

    @property
    def label(self) -> str:
        return f"{self.name} ({type_label(self.type)})"


def load_policy(spec: str, args: Mapping[str, str], admission: str = "none") -> Policy:
    """Build the policy ``spec`` names: an installed name, ``package.module:Class`` or ``path/to/file.py:Class``.

    ``args`` maps constructor arguments to strings, converted as the class annotates them. ``admission`` is
    ``none`` or ``deadline`` (:mod:`gfdit.core.policy.admission`).
    """
    return policy_maker(spec, args, admission)()


def policy_maker(spec: str, args: Mapping[str, str], admission: str = "none") -> Callable[[], Policy]:
    """The same, to build it as often as wanted: what ``spec`` names is loaded once."""
    cls = policy_class(spec)
    parameters = {parameter.name: parameter for parameter in policy_parameters(cls)}
    values = {name: _argument(spec, parameters, name, text) for name, text in args.items()}
    if missing := [p for p in parameters.values() if p.default is REQUIRED and p.name not in values]:
        raise ValueError(f"policy {spec} needs the argument {missing[0].label}")

    def make() -> Policy:
        try:
            policy = cls(**values)
        except Exception as error:
            detail = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(_one_line(f"policy {spec}: {detail}")) from error
        if not isinstance(getattr(policy, "name", None), str):
            raise ValueError(f"policy {spec}, line {_line(cls)}: class {cls.__name__} has no attribute name: str")
        return with_admission(cast(Policy, policy), admission)

    return make


def known_policies() -> dict[str, str]:
    """Installed policies: name to one-line summary."""
    summaries = {}
    for name in sorted(_entry_points()):
        try:
            summaries[name] = summary(policy_class(name))
        except ValueError as error:
            summaries[name] = f"(cannot be loaded: {error})"
    return summaries


def summary(cls: type) -> str:
    """The first line of the docstring; a dataclass without one has a generated one, which says nothing."""
    text = (cls.__doc__ or "").strip().partition("\n")[0]
    return "" if text.startswith(f"{cls.__name__}(") else text


def policy_class(spec: str) -> type:
    if ":" not in spec and not spec.endswith(".py"):
        return _from_entry_point(spec)
    place, _, class_name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(Path(place)) if is_file else _load_module(place)
    where = f"policy file {place}" if is_file else f"policy module {place}"
    return _pick_class(module, class_name, where)


def policy_parameters(cls: type) -> tuple[PolicyParameter, ...]:
    hints = typing.get_type_hints(
        cls if dataclasses.is_dataclass(cls) else inspect.getattr_static(cls, "__init__")
    )
    return tuple(
        PolicyParameter(name, hints.get(name, str), parameter.default)
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def type_label(annotation: Any) -> str:
    choices = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, choices))
    if choices:
        return " or ".join(type_label(choice) for choice in choices)
    return "none" if annotation is types.NoneType else getattr(annotation, "__name__", str(annotation))


# Where classes come from


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Read once: that goes through all that is installed, 10 ms each time."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _from_entry_point(name: str) -> type:
    points = _entry_points()
    if name not in points:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(sorted(points))}")
    module_name, _, class_name = points[name].value.partition(":")
    return _pick_class(_load_module(module_name), class_name, f"policy {name} ({module_name})")


def _load_module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(_import_error(f"policy module {name}", error)) from error


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ValueError(f"policy file {path} does not exist")
    full = path.resolve()
    name = f"gfdit_policy_file_{full.stem}_{zlib.crc32(bytes(full)):x}"
    module_spec = importlib.util.spec_from_file_location(name, full)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses look their module up to resolve annotations
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(_import_error(f"policy file {path}", error, str(full))) from error
    return module


def _import_error(where: str, error: Exception, file: str | None = None) -> str:
    """Name the line: of the syntax error, else the last one of ``file`` in the traceback."""
    if isinstance(error, SyntaxError):
        place = where if file in (None, error.filename) else f"{where}: {error.filename}"
        return _one_line(f"{place}, line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"{where}, line {lines[-1]}" if lines else where
    return _one_line(f"{place}: {type(error).__name__}: {error}")


def _pick_class(module: types.ModuleType, name: str, where: str) -> type:
    cls = getattr(module, name, None)
    if not inspect.isclass(cls):
        classes = [
            f"{value.__name__} (line {_line(value)})"
            for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        wanted = f"has no class {name!r}" if name else "needs a class, as in FILE.py:CLASS"
        raise ValueError(f"{where} {wanted}, it defines: {', '.join(classes) or 'none'}")
    if not callable(getattr(cls, "schedule", None)):
        raise ValueError(f"{where}, line {_line(cls)}: class {name} has no method schedule(self, view)")
    return cls


def _line(cls: type) -> int:
    try:
        return inspect.getsourcelines(cls)[1]
    except (OSError, TypeError, SyntaxError):  # its source is gone, or another one by now
        return 1


# Arguments


def _argument(spec: str, parameters: Mapping[str, PolicyParameter], name: str, text: str) -> Any:
    if name not in parameters:
        known = ", ".join(parameter.label for parameter in parameters.values())
        message = f"known: {known}" if known else "it takes none"
        raise ValueError(f"policy {spec} has no argument {name!r}, {message}")
    try:
        return _convert(parameters[name].type, text)
    except ValueError:
        wanted = type_label(parameters[name].type)
        raise ValueError(f"policy {spec}: argument {name} must be {wanted}, got {text!r}") from None


_FLAGS = types.MappingProxyType({"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False})


def _convert(annotation: Any, text: str) -> Any:
    """``text`` as ``annotation``; ``ValueError`` without a message worth showing if it does not fit."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        if found := [value for value in choices if str(value) == text]:
            return found[0]
        raise ValueError
    if origin in (typing.Union, types.UnionType):
        for choice in sorted(choices, key=lambda choice: choice is str):  # str takes anything: last
            try:
                return _convert(choice, text)
            except ValueError:
                continue
        raise ValueError
    if annotation is types.NoneType and text.lower() == "none":
        return None
    if annotation is bool and text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    if annotation in (int, float, str):
        return annotation(text)
    raise ValueError


def _one_line(text: str) -> str:
    return " ".join(text.split())
