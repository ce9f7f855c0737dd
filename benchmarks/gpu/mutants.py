"""Copies of the kernels with pieces of their source replaced, in place of the real ones for a while.

A copy is a package of its own, compiled or interpreted like ``gfdit.kernels``.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

# By file: what is replaced, and by what.
Edits = Mapping[str, tuple[tuple[str, str], ...]]

_numbers = itertools.count()


@contextmanager
def mutated(*edits: Edits, ptx: bool) -> Iterator[None]:
    """Push exchanges, sends and receives of this process by a copy with all ``edits`` applied. ``ptx``: on a GPU.

    Raises ValueError if a piece of source to replace is not there exactly once.
    """
    folder = Path(tempfile.mkdtemp(prefix="gfdit-mutant-"))
    package = f"gfdit_mutant_{next(_numbers)}"
    try:
        _write_copy(folder / package, package, edits)
        sys.path.insert(0, str(folder))
        modules = {
            name: importlib.import_module(f"{package}.{name}") for name in ("push_exchange", "send", "recv")
        }
        if ptx:
            _compile(package, [getattr(module, name) for name, module in modules.items()])
        with (
            patch("gfdit.comm.exchange_paths.push_exchange", modules["push_exchange"]),
            patch("gfdit.comm.one_way_paths.send", modules["send"]),
            patch("gfdit.comm.one_way_paths.recv", modules["recv"]),
        ):
            yield
    finally:
        sys.path[:] = [path for path in sys.path if path != str(folder)]
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        shutil.rmtree(folder)


def _write_copy(target: Path, package: str, edits: tuple[Edits, ...]) -> None:
    import gfdit.kernels

    shutil.copytree(Path(gfdit.kernels.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in [(name, pair) for edit in edits for name, pairs in edit.items() for pair in pairs]:
        source = (target / name).read_text()
        if source.count(old) != 1:
            raise ValueError(f"{name} has {source.count(old)} times, not once: {old!r}")
        (target / name).write_text(source.replace(old, new))
    for path in target.glob("*.py"):
        path.write_text(path.read_text().replace("gfdit.kernels", package))


def _compile(package: str, kernels: list[Any]) -> None:
    """Before any rank begins: loading a kernel may wait for running ones."""
    launch, variants = (importlib.import_module(f"{package}.{name}") for name in ("launch", "variants"))
    wanted = {"WIDTH": 16, "PACKED": True, "TMA": False}
    launch.launcher.warm_up(
        variant
        for variant in variants.all_variants(2, ptx=True)
        if variant.kernel in kernels
        and all(dict(variant.constants).get(name, value) == value for name, value in wanted.items())
    )
