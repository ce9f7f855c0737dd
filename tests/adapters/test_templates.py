"""Edits that read what was recorded of their template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gfdit.adapters.forward.templates import Templates, Unit
from gfdit.adapters.testing import KitRequest
from tests.adapters.conftest import Kits
from tests.adapters.test_inpainting import MOVED_TOLERANCE, blob, given, picture, request_for

FAMILIES = ["qwen-image", "flux", "sd3", pytest.param("qwen-image-edit", marks=pytest.mark.thorough)]


class FolderStore:
    """Units as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, unit: Unit) -> Path:
        return self.folder / "-".join(map(str, unit))

    def get(self, unit: Unit) -> torch.Tensor | None:
        return torch.load(self._path(unit)) if self._path(unit).exists() else None

    def put(self, unit: Unit, values: torch.Tensor) -> None:
        torch.save(values, self._path(unit))


def use_store(executor: Any, folder: Path) -> None:
    executor.adapter.templates = Templates(FolderStore(folder))


def edit(request: KitRequest, mode: str, **options: Any) -> KitRequest:
    sampling = {**request.sampling, "extra_args": {"gfdit": {"edit": {"mode": mode, **options}}}}
    return request.but(sampling=sampling)


def asked(family: str, mask: Image.Image | None = None) -> KitRequest:
    """Six steps of seven."""
    images = given(image=picture(3, 96, 80), mask_image=mask or blob(64))
    return request_for(family, steps=7, sampling={"strength": 0.8}, **images)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_reads_what_was_recorded(family: str, kits: Kits, tmp_path: Path) -> None:
    kit, request = kits(family, num_ranks=2), asked(family)
    kit.on_ranks(use_store, tmp_path)
    everything = asked(family, Image.new("L", (64, 64), 255))
    exact = kit.run(everything, "sp1@0")
    full = kit.run(edit(request, "cached", full_last=7), "sp1@0")
    assert kit.run(edit(request, "cached"), "sp1@0").identical(full), "nothing is recorded"
    kit.run(edit(request, "record"), "sp1@0")
    made = kit.run(edit(request, "cached"), "sp1@0")
    distance = made.difference(full)
    assert 1e-6 < distance < 0.01, distance
    assert kit.run(edit(everything, "cached"), "sp1@0").identical(exact)
    for spec in kit.candidates(request):
        other = kit.run(edit(request, "cached"), f"encode@1 {spec}@{'1,0' if spec.size == 2 else 1}")
        assert other.difference(made) <= MOVED_TOLERANCE, spec
