"""Names in source that is not imported: found where Python would find them, and lacking where it would."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gfdit.omni.sources import Function, Sources, parameters_in

PACKAGE = {
    "__init__": "from .shapes import *\nfrom .core import Base as Root\n",
    "core": """
        import abc
        import enum
        from typing import TYPE_CHECKING, Generic, TypeVar

        import torch

        if TYPE_CHECKING:
            from package.shapes import Square

        T = TypeVar("T")
        current: "Square"
        first = second = 1
        try:
            import fast
        except ImportError:
            fast = None
            fallback = True

        class Colour(enum.Enum):
            RED = 1

        class Base(abc.ABC, Generic[T]):
            limit = 3

            def __init__(self, size, *, name=None):
                self.size: int = size
                self.pair, self.other = name, name

            @property
            def area(self): ...

            async def run(self, *args, **kwargs): ...

        class Net(torch.nn.Module):
            own = 1

        class Lazy:
            def __getattr__(self, name): ...
    """,
    "shapes": """
        from . import core
        from .core import Base

        class Square(Base["int"]):
            def side(self, /, scale, offset=0, *rest, unit, digits=2, **more): ...

        class Big(core.Base): ...

        def __getattr__(name): ...
    """,
    "sub/__init__": "from ..core import Colour\n",
    "sub/deep": "from .. import shapes\nfrom ..shapes import Square as Sq\nimport package.core\n",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    root = tmp_path_factory.mktemp("place")
    for name, text in PACKAGE.items():
        path = root / "package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    return Sources(root)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("package", "Root.limit"),
        ("package", "Square.side"),  # by a star
        ("package", "core.Base"),
        ("package", "sub"),
        ("package.core", "first"),
        ("package.core", "second"),
        ("package.core", "fallback"),
        ("package.core", "fast.anything"),
        ("package.core", "Colour.RED"),
        ("package.core", "Base.size"),
        ("package.core", "Base.other"),
        ("package.core", "Base.area"),
        ("package.core", "current.side"),  # as it is annotated
        ("package.core", "current.limit"),
        ("package.core", "Net.anything"),  # which its base may have
        ("package.core", "Lazy.anything"),
        ("package.shapes", "Big.run"),
        ("package.shapes", "anything"),
        ("package.sub", "Colour.RED"),
        ("package.sub.deep", "Sq.side"),
        ("package.sub.deep", "shapes.Square"),
        ("package.sub.deep", "package.core.Base"),
    ],
)
def test_what_is_there_is_found(sources: Sources, module: str, name: str) -> None:
    assert sources.find(module, name) is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("package", "Rot"),
        ("package", "Root.limits"),
        ("package", "cores"),
        ("package.core", "third"),
        ("package.core", "Colour.BLUE"),
        ("package.core", "Base.volume"),
        ("package.core", "current.corner"),
        ("package.shapes", "Square.volume"),
        ("package.shapes", "Big.side"),
        ("package.sub", "Colour.BLUE"),
        ("package.sub.deep", "Sq.volume"),
        ("package.nowhere", "Base"),
    ],
)
def test_what_is_not_there_is_not_found(sources: Sources, module: str, name: str) -> None:
    assert sources.find(module, name) is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Square.side", "self, scale, offset=, *rest, unit, digits=, **more"),
        ("Square.__init__", "self, size, *, name="),
        ("Square.run", "self, *args, **kwargs"),
    ],
)
def test_parameters_are_those_of_the_definition(sources: Sources, name: str, parameters: str) -> None:
    found = sources.find("package.shapes", name)
    assert found is not None and isinstance(found.node, Function)
    assert parameters_in(found.node) == parameters


def test_a_module_is_its_code(sources: Sources) -> None:
    assert isinstance(sources.tree("package.sub"), ast.Module)
    assert sources.tree("package.nowhere") is None
    assert sources.version_of("package") is None and sources.place_of("nowhere") is None


def test_the_first_place_that_has_a_package_holds(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("only = 1")
    place = sources.place_of("package")
    assert place is not None
    both = Sources(tmp_path, place)
    assert both.find("package", "only") is not None and both.find("package", "Root") is None
