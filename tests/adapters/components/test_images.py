"""Workflows of components, node by node on one rank, against diffusers' pipelines with the same weights.

In float32: the same bits of FLUX and Qwen-Image. Stable Diffusion 3 runs its branches of guidance one after the
other, diffusers both in one batch, and LoRAs are not merged into weights as they are there, so those are near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.processes import Child, ChildError
from gfdit.workflow import Patch
from tests.adapters.components.generation import (
    Asked,
    Generation,
    Made,
    Net,
    generate,
    generate_in_turns,
    generate_with,
    one_block_late,
    reference,
)
from tests.support.thorough import thorough

# Of an element of the latents. Their standard deviation is between 1 and 2.
TOLERANCE = 1e-5
# Of an element of the image: the decoders of the tiny VAEs amplify.
IMAGE_TOLERANCE = 3e-5

Source = Callable[..., str]
Ranks = Callable[[int], ComponentRanks]


def asked(source: Source, name: str) -> Asked:
    """One of the cases: ``family`` and what goes with it, in words."""
    family, *words = name.split()
    guidance = {"flux": 1.0, "sd3": 4.0, "qwen-image": 4.0}[family]
    made = Asked(family, source(family), guidance=guidance)
    net: dict[str, Any] = {"scale": 0.8, "source": source(f"{family}-controlnet", seed=11)}
    for word in words:
        match word.split("@"):
            case ["guided"]:
                made = replace(made, guidance=3.0)
            case ["unguided"]:
                made = replace(made, guidance=1.0)
            case ["net"]:
                made = replace(made, nets=(Net(**net),))
            case ["nets"]:
                other = source(f"{family}-controlnet", seed=12, num_layers=3)
                made = replace(made, nets=(Net(**net), Net(other, image_seed=1)))
            case ["window"]:
                made = replace(made, nets=(Net(**net, start=0.25, end=0.75),))
            case ["union"]:
                union = source("flux-controlnet-union", seed=13)
                made = replace(made, nets=(Net(union, mode=1),))
            case ["twice"]:
                union = source("flux-controlnet-union", seed=13)
                nets = (Net(union, mode=2, scale=0.5), Net(union, mode=0, image_seed=1))
                made = replace(made, nets=nets)
            case ["pixels"]:
                made = replace(made, nets=(Net(source("flux-controlnet-pixels", seed=14), pixels=True),))
            case ["large"]:
                large = source("sd3.5-controlnet", seed=16)
                made = replace(made, nets=(Net(large, base=source("sd3")),))
            case ["lora", step]:
                lora = Patch(source(f"{family}-lora", seed=15), scale=0.8, step=int(step))
                made = replace(made, lora=lora)
            case _:
                raise ValueError(word)
    return made


EXACT = ["flux nets", "qwen-image net"]
MORE_EXACT = [
    "flux guided net",
    "flux",
    "flux guided",
    "flux net",
    "flux window",
    "flux union",
    "flux twice",
    "flux guided pixels",
    "qwen-image",
    "qwen-image unguided",
    "qwen-image window",
]
NEAR = ["sd3 net lora@2"]
MORE_NEAR = [
    "flux net lora@3",
    "sd3",
    "sd3 unguided",
    "sd3 net",
    "sd3 unguided net",
    "sd3 nets",
    "sd3 window",
    "sd3 large",
    "sd3 lora@0",
    "flux lora@0",
    "flux guided lora@2",
    "qwen-image lora@0",
    "qwen-image net lora@1",
]


@pytest.mark.parametrize("name", [*EXACT, *thorough(MORE_EXACT)])
def test_the_same_bits(ranks: Ranks, diffusers: Child, source: Source, name: str) -> None:
    what = asked(source, name)
    made, expected = ranks(1).call(generate, what), diffusers.call("run", reference, what)
    assert made.difference(expected) == 0
    assert matters(ranks, what, made)


@pytest.mark.parametrize("name", [*NEAR, *thorough(MORE_NEAR)])
def test_near(ranks: Ranks, diffusers: Child, source: Source, name: str) -> None:
    what = asked(source, name)
    made, expected = ranks(1).call(generate, what), diffusers.call("run", reference, what)
    assert made.latents_difference(expected) <= TOLERANCE
    assert made.difference(expected) <= IMAGE_TOLERANCE
    assert matters(ranks, what, made)


def matters(ranks: Ranks, what: Asked, made: Made) -> bool:
    """Whether nets and LoRA, each, change the image by much more than what is tolerated."""
    without = []
    if what.nets:
        without.append(replace(what, nets=()))
    if what.lora is not None:
        without += [
            replace(what, lora=None),
            replace(what, lora=replace(what.lora, step=(what.lora.step or 0) + 1)),
        ]
    return all(ranks(1).call(generate, other).difference(made) > 100 * IMAGE_TOLERANCE for other in without)


@pytest.mark.parametrize("family", ["sd3", *thorough(["flux", "qwen-image"])])
def test_residuals_one_block_late_are_seen(ranks: Ranks, diffusers: Child, source: Source, family: str) -> None:
    """Negative control."""
    what = asked(source, f"{family} net")
    late = ranks(1).call(generate_with, what, one_block_late)
    assert late.difference(diffusers.call("run", reference, what)) > 1000 * IMAGE_TOLERANCE


def test_workflows_in_turns_are_each_alone(ranks: Ranks, source: Source) -> None:
    """A step of each, on one rank: they share transformers, VAEs and text encoders."""
    names = ["flux net lora@1", "sd3 nets", "flux union", "sd3 lora@2", "flux lora@3", "qwen-image net", "sd3"]
    several = tuple(asked(source, name) for name in names)
    together = ranks(1).call(generate_in_turns, several)
    for name, what, made in zip(names, several, together, strict=True):
        assert made.difference(ranks(1).call(generate, what)) == 0, name


def test_a_residual_is_asked_for_when_its_block_has_run(ranks: Ranks, source: Source) -> None:
    """So a net may still be at work. Three blocks of two kinds, two residuals each, after the header."""
    seen = ranks(1).call(blocks_and_residuals, asked(source, "flux net"))
    doubles = ["block", "residual 1", "block", "block", "residual 2"]
    assert seen == ["residual 0", *doubles, *[word.replace("1", "3").replace("2", "4") for word in doubles]]


def blocks_and_residuals(rank: Any, what: Asked) -> list[str]:
    run = Generation(rank, what)
    (stream,) = run.residuals(None)
    seen: list[str] = []

    class Watched:
        def fetch(self, index: int) -> Any:
            seen.append(f"residual {index}")
            return stream.fetch(index)

    transformer = rank.host.components(run.parts.base).pipeline.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    hooks = [block.register_forward_pre_hook(lambda *args: seen.append("block")) for block in blocks]
    run.residuals = lambda guidance_scale: [Watched()]  # type: ignore[method-assign,list-item]
    run.step()
    for hook in hooks:
        hook.remove()
    return seen


def test_a_net_outside_of_its_window_computes_nothing(ranks: Ranks, source: Source) -> None:
    counts = ranks(1).call(parts_by_step, asked(source, "sd3 window"))
    assert counts == [1, 3, 3, 1]


def parts_by_step(rank: Any, what: Asked) -> list[int]:
    run, counts = Generation(rank, what), []
    for _ in range(what.steps):
        (stream,) = run.residuals(what.guidance)
        counts.append(stream.num_parts)
        run.step()
    return counts


def test_a_net_without_positions_needs_a_base(ranks: Ranks, source: Source) -> None:
    what = asked(source, "sd3 large")
    with pytest.raises(ChildError, match=r"cannot be loaded: .* embeds no positions: say base="):
        ranks(1).call(generate, replace(what, nets=(replace(what.nets[0], base=None),)))


def test_a_union_net_needs_a_mode(ranks: Ranks, source: Source) -> None:
    what = asked(source, "flux union")
    with pytest.raises(ChildError, match="is a Union ControlNet: it needs a mode"):
        ranks(1).call(generate, replace(what, nets=(replace(what.nets[0], mode=None),)))


def test_an_image_that_is_none(ranks: Ranks, source: Source) -> None:
    with pytest.raises(ChildError, match="a control image must be an image, got str"):
        ranks(1).call(condition_of_text, source("flux"))


def condition_of_text(rank: object, where: str) -> None:
    from gfdit.adapters.components.base import pixels_of

    pixels_of("a picture", 128, 128)


@pytest.mark.parametrize("size", [(8, 128), (128, 100)])
def test_a_side_that_cannot_be(ranks: Ranks, source: Source, size: tuple[int, int]) -> None:
    what = replace(asked(source, "flux"), height=size[0], width=size[1])
    with pytest.raises(ChildError, match=r"(height|width) must be a multiple of 16 pixels, got (8|100)"):
        ranks(1).call(generate, what)
