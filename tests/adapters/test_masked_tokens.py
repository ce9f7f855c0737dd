"""Edits whose steps compute the tokens under the mask, with keys and values that the others had before."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from gfdit.adapters.testing import KitRequest
from tests.adapters.conftest import Kits
from tests.adapters.test_inpainting import MOVED_TOLERANCE, blob, given, picture, request_for
from tests.support.thorough import thorough

FAMILIES = ["qwen-image", *thorough(("flux", "sd3", "qwen-image-edit"))]


def own(request: KitRequest, **options: int) -> KitRequest:
    sampling = {**request.sampling, "extra_args": {"gfdit": {"edit": {"mode": "own", **options}}}}
    return request.but(sampling=sampling)


def asked(family: str, mask: Image.Image | None = None) -> KitRequest:
    """Six steps of seven."""
    images = given(image=picture(3, 96, 80), mask_image=mask or blob(64))
    return request_for(family, steps=7, sampling={"strength": 0.8}, **images)


def num_kept(executor: Any) -> int:
    return len(executor.adapter._kept_keys)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_are_all_tokens(family: str, kits: Kits) -> None:
    kit = kits(family, num_ranks=2)
    exact = asked(family, Image.new("L", (64, 64), 255))
    for script in ("sp1@0", "sp2@1,0", "cfg2xsp1@0,1" if family != "flux" else "sp2@0,1"):
        assert kit.run(own(exact), script).identical(kit.run(exact, script)), script
    exact = asked(family)
    assert kit.run(own(exact, refresh_every=1), "sp1@0").identical(kit.run(exact, "sp1@0"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_under_a_mask_are_the_same_at_every_degree(family: str, kits: Kits) -> None:
    kit = kits(family, num_ranks=2)
    exact = asked(family)
    made = kit.run(own(exact), "sp1@0")
    distance = made.difference(kit.run(exact, "sp1@0"))
    assert 1e-4 < distance < 0.5, distance
    for spec in kit.candidates(exact):
        other = kit.run(own(exact), f"encode@1 {spec}@{'1,0' if spec.size == 2 else 1}")
        assert other.difference(made) <= MOVED_TOLERANCE, spec
    for turn in kit.run_interleaved([(own(exact), "sp1@0"), (own(exact).but(seed=8), "sp1@0")])[:1]:
        assert turn.identical(made)
    assert kit.on_ranks(num_kept) == [0, 0], "keys are dropped with their request"


@pytest.mark.thorough
def test_what_was_kept_elsewhere_is_of_no_use(kits: Kits) -> None:
    """Every step on another rank than the last one computes all tokens, also where older keys are at hand."""
    kit, exact = kits("qwen-image", num_ranks=2), asked("qwen-image")
    made = kit.run(exact, "sp1@0")
    assert kit.run(own(exact), "encode@0 sp1@0 sp1@1 sp1@0 sp1@1 sp1@0 sp1@1 decode@0").identical(made)
    wide = kit.run(own(exact), "encode@0 sp1@0 sp2@0,1 sp1@0 sp2@1,0 sp2@0,1 sp1@0 decode@0")
    assert wide.difference(made) <= MOVED_TOLERANCE


def test_a_rank_that_lost_its_keys_computes_all(kits: Kits) -> None:
    """And so do those that work with it. One that went its own way would be noticed."""
    kit, exact = kits("qwen-image", num_ranks=2), asked("qwen-image")
    made = {script: kit.run(exact, script) for script in ("sp1@0", "sp2@1,0", "cfg2xsp1@0,1")}
    kit.on_ranks(lose_keys, {0})
    try:
        for script, whole in made.items():
            assert kit.run(own(exact), script).identical(whole), script
    finally:
        kit.on_ranks(lose_keys, set())
    assert not kit.run(own(exact), "sp1@0").identical(made["sp1@0"])


def test_without_room_all_tokens_are_computed(kits: Kits) -> None:
    kit, exact = kits("qwen-image", num_ranks=2), asked("qwen-image")
    (limit, _) = kit.on_ranks(limit_keys, 1000)
    try:
        assert kit.run(own(exact), "sp1@0").identical(kit.run(exact, "sp1@0"))
    finally:
        kit.on_ranks(limit_keys, limit)


def limit_keys(executor: Any, limit_bytes: int) -> int:
    kept = executor.adapter._kept_keys
    before, kept.limit_bytes = kept.limit_bytes, limit_bytes
    return before


def lose_keys(executor: Any, ranks: set[int]) -> None:
    """Sabotage: after every step what these have kept is gone."""
    kept = executor.adapter._kept_keys
    vars(kept).pop("has", None)
    if executor.rank in ranks:
        kept.has = lambda *_: False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "gfdit.edit.mode must be one of exact, own"),
        ({"refresh_every": 0}, "gfdit.edit.refresh_every must be a positive integer"),
        ({"full_last": -1}, "gfdit.edit.full_last must be an integer of at least 0"),
        ({"keep": 1}, "gfdit.edit.keep is unknown, allowed: mode, refresh_every, full_last"),
        (3, "gfdit.edit must be an object"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    from gfdit.adapters.options import RequestOptions

    with pytest.raises(ValueError, match=message):
        RequestOptions.parse({"edit": options})
