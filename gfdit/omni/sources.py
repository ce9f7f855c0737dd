"""What packages define, read from their source: in a folder or in a wheel, and nothing of them is imported."""

from __future__ import annotations

import ast
import builtins
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_OF_PYTHON = sys.stdlib_module_names


class Found(NamedTuple):
    """Where a name is defined, by what. ``node`` None: it exists, but only running the code would tell more."""

    module: str
    node: ast.AST | None


_UNKNOWN = Found("", None)
#: For what is Python's own: nothing that gfdit looks for is there.
_EMPTY = Found("", ast.ClassDef("", [], [], [], []))


class Sources:
    """Of the packages in ``places``, folders and wheels; where several have a package, the first one's."""

    def __init__(self, *places: Path) -> None:
        self._places = places
        self._wheels = {place: zipfile.ZipFile(place) for place in places if place.is_file()}
        self._trees: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}

    def place_of(self, package: str) -> Path | None:
        """The place that ``package`` is read from."""
        return next((place for place in self._places if self._read(place, [f"{package}/__init__.py"])), None)

    def version_of(self, package: str) -> str | None:
        """As it was built, if the place that ``package`` is in says so."""
        if (place := self.place_of(package)) is None:
            return None
        wheel = self._wheels.get(place)
        names = [path.name for path in place.iterdir()] if wheel is None else wheel.namelist()
        for name in names:
            top = name.partition("/")[0]
            if top.endswith(".dist-info") and top.startswith(f"{package}-"):
                return top.removesuffix(".dist-info").removeprefix(f"{package}-")
        for line in (self._read(place, ["PKG-INFO"]) or "").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
        return None

    def tree(self, module: str) -> ast.Module | None:
        """The code of ``module``; None if there is none."""
        if module not in self._trees:
            path = module.replace(".", "/")
            place = self.place_of(module.partition(".")[0])
            text = None if place is None else self._read(place, [f"{path}.py", f"{path}/__init__.py"])
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """What ``name`` is in ``module``, through imports; it may be of an attribute: ``Class.method``."""
        first, *others = name.split(".")
        found = self._in_module(module, first)
        for other in others:
            found = None if found is None else self.member(found, other)
        return found

    def member(self, found: Found, name: str) -> Found | None:
        """Of a class, its bases, its instances, or of what is annotated as one."""
        node = found.node
        if isinstance(node, ast.Module):
            return self._in_module(found.module, name)
        if isinstance(node, ast.AnnAssign):
            return self._member_of_any(found.module, [node.annotation], name)
        if not isinstance(node, ast.ClassDef):
            return _UNKNOWN
        own = own_members(node)
        if (here := own.get(name) or _attributes_of_instances(node).get(name)) is not None:
            return Found(found.module, here)
        inherited = self._member_of_any(found.module, node.bases, name)
        return _UNKNOWN if inherited is None and "__getattr__" in own else inherited

    def _member_of_any(self, module: str, classes: Iterable[ast.expr], name: str) -> Found | None:
        for expression in classes:
            if (found := self.member(self._value(module, expression), name)) is not None:
                return found
        return None

    def _value(self, module: str, expression: ast.expr) -> Found:
        """Of an expression that names a class."""
        match expression:
            case ast.Subscript(value=value):
                return self._value(module, value)
            case ast.Name(id=name):
                return self._in_module(module, name) or (_EMPTY if hasattr(builtins, name) else _UNKNOWN)
            case ast.Attribute(value=value, attr=attr):
                inner = self._value(module, value)
                return _EMPTY if inner is _EMPTY else self.member(inner, attr) or _UNKNOWN
            case ast.Constant(value=str(text)):
                return self._value(module, ast.parse(text, mode="eval").body)
        return _UNKNOWN

    def _in_module(self, module: str, name: str) -> Found | None:
        root = module.partition(".")[0]
        if self.place_of(root) is None:
            return _EMPTY if root in _OF_PYTHON else _UNKNOWN
        if (names := self._names_of(module)) is None:
            return None
        node = names.get(name)
        if isinstance(node, ast.ImportFrom):
            source, original = _absolute(module, node, self._is_package(module)), _original(node, name)
            return self._in_module(source, original)
        if isinstance(node, ast.Import):
            return self._of_import(node, name)
        if node is not None:
            return Found(module, node)
        if (tree := self.tree(f"{module}.{name}")) is not None:
            return Found(f"{module}.{name}", tree)
        for starred in [other for key, other in names.items() if key.startswith("*")]:
            assert isinstance(starred, ast.ImportFrom)
            source = _absolute(module, starred, self._is_package(module))
            if (found := self._in_module(source, name)) not in (None, _UNKNOWN):  # a star takes what is there
                return found
        return _UNKNOWN if "__getattr__" in names else None

    def _of_import(self, node: ast.Import, name: str) -> Found:
        alias = next(one for one in node.names if (one.asname or one.name.partition(".")[0]) == name)
        module = alias.name if alias.asname else name
        if (tree := self.tree(module)) is not None:
            return Found(module, tree)
        return _EMPTY if module.partition(".")[0] in _OF_PYTHON else _UNKNOWN

    def _names_of(self, module: str) -> dict[str, ast.AST] | None:
        if (tree := self.tree(module)) is None:
            return None
        if module not in self._names:
            self._names[module] = dict(_defined(tree.body))
        return self._names[module]

    def _is_package(self, module: str) -> bool:
        place = self.place_of(module.partition(".")[0])
        return place is not None and self._read(place, [f"{module.replace('.', '/')}/__init__.py"]) is not None

    def _read(self, place: Path, paths: Iterable[str]) -> str | None:
        wheel = self._wheels.get(place)
        for path in paths:
            try:
                data = (place / path).read_bytes() if wheel is None else wheel.read(path)
            except (OSError, KeyError):
                continue
            return data.decode()
        return None


def own_members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """What the body of a class defines."""
    return dict(_defined(cls.body))


def parameters_in(function: Function) -> str:
    """As :func:`gfdit.omni.compatibility.parameters_of` says it of a function."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    said = [f"{arg.arg}=" if index >= first_default else arg.arg for index, arg in enumerate(positional)]
    if given.vararg or given.kwonlyargs:
        said.append(f"*{given.vararg.arg if given.vararg else ''}")
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        said.append(arg.arg if default is None else f"{arg.arg}=")
    if given.kwarg:
        said.append(f"**{given.kwarg.arg}")
    return ", ".join(said)


def _defined(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements define, and by what; the last one holds. Names of star imports begin with a star."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=aliases):
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in aliases)
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    starred = f"*{'.' * node.level}{node.module or ''}"
                    yield (starred if alias.name == "*" else alias.asname or alias.name), node
            case ast.Assign(targets=targets):
                yield from ((name.id, node) for target in targets for name in _names_in(target))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for block in ("body", "orelse", "finalbody"):
                    yield from _defined(getattr(node, block, ()))
                for handler in getattr(node, "handlers", ()):
                    yield from _defined(handler.body)


def _names_in(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _attributes_of_instances(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """What methods assign to attributes of ``self``."""
    return {
        target.attr: node
        for node in ast.walk(cls)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for whole in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(whole)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _original(node: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
