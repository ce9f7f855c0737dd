"""Edits with different masks, at different steps of theirs, in one pass (FlashPS §4.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gfdit.adapters.masked_tokens import Together
from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters.conftest import Kits
from tests.adapters.test_inpainting import MOVED_TOLERANCE, blob, given
from tests.adapters.test_masked_tokens import asked, own
from tests.adapters.test_templates import edit, record, use_store
from tests.families.image_requests import left_half, picture
from tests.support.thorough import thorough

FAMILIES = ["flux", *thorough(("qwen-image", "sd3"))]


def blobs(side: int, *, zoom: float) -> Image.Image:
    """As :func:`blob`, but larger and further to the right."""
    return blob(round(side * zoom)).crop((0, 0, side, side)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def several(family: str) -> list[KitRequest]:
    """About as many tokens of each; the last one begins two steps later."""
    one = asked(family)
    masks = [left_half(64), blobs(64, zoom=1.3)]
    others = [one.but(seed=7 + n, **given(image=picture(n, 96, 80), mask_image=m)) for n, m in enumerate(masks)]
    return [one, others[0], others[1].but(sampling={**one.sampling, "strength": 0.6})]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_edits_of_their_own_keys_share_passes(family: str, kits: Kits) -> None:
    kit, edits = kits(family, num_ranks=2), [own(each) for each in several(family)]
    for script in ("sp1@0", "sp2@1,0"):
        alone = [kit.run(each, script) for each in edits]
        batched = kit.run_batched(edits, script)
        assert batched.requests_per_forward[1] == 3, batched
        for made, expected in zip(batched.outputs, alone, strict=True):
            assert made.difference(expected) <= MOVED_TOLERANCE, script


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_edits_of_templates_share_passes(family: str, kits: Kits, tmp_path: Path) -> None:
    """Also with prompts of other lengths, and beside one that computes all its tokens."""
    kit = kits(family, num_ranks=2)
    kit.on_ranks(use_store, tmp_path)
    edits = [edit(each, "cached") for each in several(family)]
    edits[1] = edits[1].but(prompt="two foxes")
    for each in edits:
        record(kit, edit(each, "record"))
    alone = [kit.run(each, "sp1@0") for each in edits]
    exact = asked(family).but(seed=9)
    whole = kit.run(exact, "sp1@0")
    for script in ("sp1@0", "sp2@1,0"):
        batched = kit.run_batched([*edits, exact], script)
        assert batched.requests_per_forward[0] == 2, "three are one pass, the other is one"
        for made, expected in zip(batched.outputs, [*alone, whole], strict=True):
            assert made.difference(expected) <= MOVED_TOLERANCE, script
    if family == "sd3":  # whose positions are added before tokens are left out
        return
    kit.on_ranks(take_first_positions, True)
    try:
        misled = kit.run_batched(edits, "sp1@0")
        assert misled.outputs[0].difference(alone[0]) <= MOVED_TOLERANCE
        assert misled.outputs[1].difference(alone[1]) > MOVED_TOLERANCE
    finally:
        kit.on_ranks(take_first_positions, False)


SIDE_BY_SIDE = Together.side_by_side


def take_first_positions(executor: Any, flag: bool) -> None:
    """Sabotage: every row is rotated as the first one is, or has its positions where they are added."""

    def of_first(self: Together, values: list[Any]) -> Any:
        return SIDE_BY_SIDE(self, [values[0]] * len(values))

    Together.side_by_side = of_first if flag else SIDE_BY_SIDE  # type: ignore[method-assign, assignment]


def test_small_masks_wait_for_no_large_ones(kits: Kits) -> None:
    """They would be as many rows as the largest."""
    kit: AdapterKit = kits("qwen-image", num_ranks=2)
    one = asked("qwen-image")
    large = one.but(**given(image=picture(3, 96, 80), mask_image=Image.new("L", (64, 64), 255)))
    batched = kit.run_batched([own(one), own(large)], "sp1@0")
    assert set(batched.requests_per_forward) == {1} and not batched.split_reasons
    assert batched.outputs[1].identical(kit.run(large, "sp1@0"))
