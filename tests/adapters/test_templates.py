"""Edits that read what was recorded of their template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from gfdit.adapters.forward.templates import Templates
from gfdit.adapters.masked_tokens import FromTemplate, blocks_of
from gfdit.adapters.testing import AdapterKit, KitRequest
from gfdit.templates.store import Reading, TemplateStore
from tests.adapters.conftest import Kits
from tests.adapters.test_inpainting import MOVED_TOLERANCE, blob, given, picture, request_for
from tests.support.thorough import thorough

FAMILIES = ["qwen-image", *thorough(("flux", "sd3", "qwen-image-edit"))]

FROM_TEMPLATE = FromTemplate._attend


def store_in(folder: Path) -> TemplateStore:
    return TemplateStore(None, folder, host_bytes=1 << 30)


def use_store(executor: Any, folder: Path) -> None:
    executor.adapter.templates = Templates(store_in(folder))
    executor.adapter.templates.num_full_blocks = 0


def finish(executor: Any) -> None:
    executor.adapter.templates.flush()


def edit(request: KitRequest, mode: str, **options: Any) -> KitRequest:
    sampling = {**request.sampling, "extra_args": {"gfdit": {"edit": {"mode": mode, **options}}}}
    return request.but(sampling=sampling)


def record(kit: AdapterKit, request: KitRequest, script: str = "sp1@0") -> None:
    kit.run(request, script)
    kit.on_ranks(finish)


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
    record(kit, edit(request, "record"))
    made = kit.run(edit(request, "cached"), "sp1@0")
    distance = made.difference(full)
    assert 1e-6 < distance < 0.01, distance
    assert kit.run(edit(everything, "cached"), "sp1@0").identical(exact)
    for spec in kit.candidates(request):
        other = kit.run(edit(request, "cached"), f"encode@1 {spec}@{'1,0' if spec.size == 2 else 1}")
        assert other.difference(made) <= MOVED_TOLERANCE, spec


def compute_blocks(executor: Any, num_blocks: int | None) -> None:
    executor.adapter.templates.num_full_blocks = num_blocks


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_leading_blocks_may_compute_all_tokens(family: str, kits: Kits, tmp_path: Path) -> None:
    """If all blocks do, it is the full picture, but for the order in which attention adds up."""
    kit, request = kits(family, num_ranks=2), asked(family)
    kit.on_ranks(use_store, tmp_path)
    record(kit, edit(request, "record"))
    full = kit.run(edit(request, "cached", full_last=7), "sp1@0")
    cached = kit.run(edit(request, "cached"), "sp1@0")
    num_blocks = kit.on_ranks(count_blocks)[0]
    for number in (1, num_blocks - 1, num_blocks):
        kit.on_ranks(compute_blocks, number)
        made = kit.run(edit(request, "cached"), "sp1@0")
        assert not made.identical(cached)
        for spec in kit.candidates(request):
            other = kit.run(edit(request, "cached"), f"sp1@1 {spec}@{'1,0' if spec.size == 2 else 1}")
            assert other.difference(made) <= MOVED_TOLERANCE, (number, spec)
    assert made.difference(full) <= cached.difference(full) / 10
    kit.on_ranks(compute_blocks, None)  # as many as are best, of which ranks have their own opinions
    assert kit.run(edit(request, "cached"), "sp2@0,1").difference(full) <= 2 * cached.difference(full)


def count_blocks(executor: Any) -> int:
    return len(blocks_of(executor.runner.pipeline.transformer))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen-image", "flux", "sd3", "qwen-image-edit"])
def test_four_ranks_read_what_one_has_recorded(family: str, kits: Kits, tmp_path: Path) -> None:
    kit, request = kits(family), asked(family)
    kit.on_ranks(use_store, tmp_path)
    record(kit, edit(request, "record"))
    made = kit.run(edit(request, "cached"), "sp1@0")
    for spec in kit.candidates(request):
        ranks = ",".join(map(str, (2, 0, 3, 1)[: spec.size]))
        other = kit.run(edit(request, "cached"), f"sp1@1 {spec}@{ranks} sp1@3")
        assert other.difference(made) <= MOVED_TOLERANCE, spec


# Weights of a model that nobody has trained say little: these make tokens matter to each other. Powers of two can
# be taken back.
AMPLIFICATION = 4.0


def amplify(executor: Any, factor: float) -> None:
    for name, parameter in executor.runner.pipeline.transformer.named_parameters():
        if "blocks" in name and parameter.ndim > 1:
            parameter.data.mul_(factor)
    for name, parameter in executor.runner.pipeline.vae.named_parameters():
        if name.startswith("encoder.conv_out"):  # or noise is larger than any image
            parameter.data.mul_(factor**2)


class OtherReading(Reading):
    """Of the only template there is, whichever is asked for; with ``last``, the last step for the first."""

    last = 0

    def heads(self, step: int, branch: int, heads: Any) -> Any:
        return super().heads(self.last - step if self.last else step, branch, heads)


def use_other_store(executor: Any, folder: Path, last: int = 0) -> None:
    use_store(executor, folder)
    store = executor.adapter.templates.store
    (template,) = store.templates()
    kind = type("Misled", (OtherReading,), {"last": last})
    store.reading = lambda _: kind(store, template)


def use_nothing(executor: Any) -> None:
    FromTemplate._attend = lambda self, key, value: (key, value)  # type: ignore[method-assign]


def use_templates(executor: Any) -> None:
    FromTemplate._attend = FROM_TEMPLATE  # type: ignore[method-assign]


def psnr_db(one: np.ndarray, other: np.ndarray) -> float:
    """Of pixels between -1 and 1."""
    return float(-10 * np.log10(np.mean((one - other) ** 2) / 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_was_recorded_of_this_template_will_do(family: str, kits: Kits, tmp_path: Path) -> None:
    kit, request = kits(family, num_ranks=2), asked(family)
    request = request.but(steps=12, sampling={"strength": 0.4})  # late: little noise
    folders = {name: tmp_path / name for name in ("right", "other template", "other noise")}
    other = given(image=ImageOps.invert(picture(11, 96, 80)), mask_image=blob(64))
    recorded = {"other template": edit(request.but(**other), "record"), "right": edit(request, "record")}
    recorded["other noise"] = edit(request, "record", template_seed=1)
    kit.on_ranks(amplify, AMPLIFICATION)
    try:
        for name, recording in recorded.items():
            folders[name].mkdir()
            kit.on_ranks(use_store, folders[name])
            record(kit, recording)
        full = kit.run(edit(request, "cached", full_last=12), "sp1@0").array

        def quality_db(use: Any, *args: Any) -> float:
            kit.on_ranks(use, *args)
            return psnr_db(kit.run(edit(request, "cached"), "sp1@0").array, full)

        right = quality_db(use_other_store, folders["right"])
        found = {name: quality_db(use_other_store, folders[name]) for name in recorded if name != "right"}
        found["other step"] = quality_db(use_other_store, folders["right"], 11 + 7)
        found["nothing"] = quality_db(use_nothing)
        print(f"{family}: right {right:.1f} dB, " + ", ".join(f"{name} {db:.1f}" for name, db in found.items()))
        assert all(right > db + 1 for db in found.values()), (right, found)
    finally:
        kit.on_ranks(use_templates)
        kit.on_ranks(amplify, 1 / AMPLIFICATION)
