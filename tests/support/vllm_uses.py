"""What gfdit uses of vLLM and vLLM-Omni, by its code: names it imports, members it overrides or uses of itself.

``python -m tests.support.vllm_uses && make format`` writes that into ``gfdit/omni/vllm_symbols.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import gfdit
from gfdit.omni.compatibility import parameters_of

ROOT = Path(gfdit.__file__).parent
_LONG = 80  # of a text: it goes into several
# What adapters are developed with; no server imports it.
_NOT_SERVED = ("adapters/testing", "adapters/tiny_models")


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(_NOT_SERVED):
            yield place, ast.parse(path.read_text())


def _is_theirs(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("vllm", "vllm_omni")


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def symbols() -> dict[str, dict[str, str | None]]:
    """Names by module, of attributes of imports too: ``HookRegistry.get_or_create``. With parameters."""
    found: dict[str, set[str]] = {}
    for _, tree in _sources():
        modules: dict[str, str] = {}  # imported as a whole, by what they are called
        names: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_theirs(node.module) and not node.level:
                assert node.module is not None
                for alias in node.names:
                    if _is_module(full := f"{node.module}.{alias.name}"):
                        modules[alias.asname or alias.name] = full
                        found.setdefault(full, set())
                    else:
                        found.setdefault(node.module, set()).add(alias.name)
                        names[alias.asname or alias.name] = node.module, alias.name
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            if (called := node.value.id) in modules:
                found[modules[called]].add(node.attr)
            elif called in names and not called.startswith("logger"):
                module, name = names[called]
                found[module].add(f"{name}.{node.attr}")
    return {
        module: {name: parameters_of(attrgetter(name)(importlib.import_module(module))) for name in sorted(names)}
        for module, names in sorted(found.items())
    }


def members() -> dict[str, dict[str, str | None]]:
    """Of their classes, by ``module:Class``: what classes of gfdit override or use of them.

    With the parameters of methods that are overridden, None for what is only used and for what is no method.
    """
    found: dict[str, dict[str, str | None]] = {}
    used = _used_of_self()
    for module in _modules():
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for name in {*vars(cls), *used.get(cls.__qualname__, ())}:
                bases = [base for base in cls.__mro__ if _is_theirs(base.__module__) and name in vars(base)]
                if not bases or _is_made_by_python(cls, name):
                    continue
                base = bases[0]
                known = found.setdefault(f"{base.__module__}:{base.__qualname__}", {})
                overridden = name in vars(cls)
                known[name] = parameters_of(vars(base)[name]) if overridden else known.get(name)
    return {key: dict(sorted(members.items())) for key, members in sorted(found.items())}


def _is_made_by_python(cls: type, name: str) -> bool:
    if name == "__init__":
        return dataclasses.is_dataclass(cls)
    return name.startswith(("__", "_abc_", "_is_protocol"))


def _modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages([str(ROOT)], "gfdit."):
        place = info.name.removeprefix("gfdit.").replace(".", "/")
        if place.startswith(("omni", "adapters")) and not place.startswith(_NOT_SERVED):
            yield importlib.import_module(info.name)


def _used_of_self() -> dict[str, set[str]]:
    """Names of attributes of ``self`` and ``super()``, by class."""
    found: dict[str, set[str]] = {}
    for _, tree in _sources():
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            names = found.setdefault(cls.name, set())
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and _is_self(node.value):
                    names.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id == "self"


def write() -> None:
    """Renew the two tables, and the version that they are of."""
    path = ROOT / "omni" / "vllm_symbols.py"
    version = importlib.metadata.version("vllm-omni")
    text = re.sub(r"(?m)^VERSION = .*$", f'VERSION = "{version}"', path.read_text())
    for name, table in (("SYMBOLS", symbols()), ("MEMBERS", members())):
        begin = text.index("{\n", text.index(f"\n{name}: "))
        end = text.index("\n}\n", begin) + len("\n}")
        text = text[:begin] + _literal(table) + text[end:]
    path.write_text(text)


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + "".join(f"{_literal(key)}: {_literal(item)},\n" for key, item in value.items()) + "}"
    if value is None:
        return "None"
    lines = textwrap.wrap(value, _LONG, break_long_words=False, break_on_hyphens=False) or [""]
    texts = [f'"{line} "' for line in lines[:-1]] + [f'"{lines[-1]}"']
    return texts[0] if len(texts) == 1 else "(\n" + "\n".join(texts) + ")"


if __name__ == "__main__":
    write()
