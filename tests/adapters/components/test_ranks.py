"""Steps of components on several ranks, with residuals and LoRAs, are those of one rank, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.core.layouts import ParallelSpec
from tests.adapters.components.generation import Asked, Generation, generate
from tests.adapters.components.test_images import asked
from tests.support.thorough import thorough

Source = Callable[..., str]
Ranks = Callable[[int], ComponentRanks]

LAYOUTS = [
    ((1, 0), ParallelSpec(2)),
    ((0, 1), ParallelSpec(1, 2)),
    ((3, 0, 2, 1), ParallelSpec(4)),
    ((2, 0, 1, 3), ParallelSpec(2, 2)),
]
# In pixels; 64, 65 and 63 tokens, of which four ranks have 16, 17 and 16, the last one less.
SIZES = [(128, 128), (80, 208), (144, 112)]
NAMES = ["sd3 nets", "sd3 net lora@1", "flux guided net lora@1", "flux guided union", "qwen-image net"]


@pytest.mark.parametrize("name", ["sd3 net lora@1", *thorough(["flux guided net lora@1", "qwen-image net"])])
def test_two_ranks(ranks: Ranks, source: Source, name: str) -> None:
    what = sized(asked(source, name), (80, 208))
    expected = ranks(2).call(generate, what)
    for layout in LAYOUTS[:2]:
        for made in ranks(2).call_all(layout[0], generate, what, layout):
            assert made.difference(expected) == 0, layout


@pytest.mark.thorough
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout(ranks: Ranks, source: Source, name: str, size: tuple[int, int]) -> None:
    what = sized(asked(source, name), size)
    expected = ranks(4).call(generate, what)
    for layout in LAYOUTS:
        for made in ranks(4).call_all(layout[0], generate, what, layout):
            assert made.difference(expected) == 0, layout


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["flux", "sd3", "qwen-image"])
def test_tokens_are_split(ranks: Ranks, source: Source, family: str) -> None:
    """Negative control: else the equality above would say nothing."""
    what = sized(asked(source, f"{family} net"), (80, 208))
    counts = [ranks(4).call(tokens_in_a_block, what, None)]
    layout = LAYOUTS[2]
    counts += ranks(4).call_all(layout[0], tokens_in_a_block, what, layout)
    assert counts == [65, 17, 17, 17, 17]


def tokens_in_a_block(rank: Any, what: Asked, layout: Any) -> int:
    from gfdit.core.layouts import ExecutionLayout

    run = Generation(rank, what)
    block = rank.host.components(run.parts.base).pipeline.transformer.transformer_blocks[0]
    seen = []
    hook = block.register_forward_hook(lambda block, args, output: seen.append(output[1].shape[1]))
    run.step(None if layout is None else ExecutionLayout(*layout))
    hook.remove()
    return seen[0]


@pytest.mark.thorough
def test_shares_cut_as_if_they_were_even_are_seen(ranks: Ranks, source: Source) -> None:
    """Negative control: 65 tokens are 17, 17, 17 and 14 of them, not 17, 16, 16 and 16."""
    what = sized(asked(source, "flux net"), (80, 208))
    expected = ranks(4).call(generate, what)
    layout = LAYOUTS[2]
    made = ranks(4).call_all(layout[0], generate_with_even_shares, what, layout)
    assert made[0].difference(expected) > 0.01


def generate_with_even_shares(rank: Any, what: Asked, layout: Any) -> Any:
    import torch
    from vllm_omni.diffusion.distributed.parallel_state import get_sequence_parallel_rank as index_of

    from gfdit.adapters.components import residuals

    def even(residual: torch.Tensor, num_own: int) -> torch.Tensor:
        part = torch.tensor_split(residual, 4, dim=1)[index_of()]
        return torch.nn.functional.pad(part, (0, 0, 0, num_own - part.shape[1]))

    right, residuals._own_tokens = residuals._own_tokens, even
    try:
        return generate(rank, what, layout)
    finally:
        residuals._own_tokens = right


@pytest.mark.thorough
def test_branches_swapped_are_seen(ranks: Ranks, source: Source) -> None:
    """Negative control: SD3's residuals are those of either branch."""
    what = asked(source, "sd3 net")
    expected = ranks(2).call(generate, what)
    made = ranks(2).call_all((0, 1), generate_with_branches_swapped, what, LAYOUTS[1])
    assert made[0].difference(expected) > 0.01


def generate_with_branches_swapped(rank: Any, what: Asked, layout: Any) -> Any:
    from gfdit.adapters.components import residuals

    step: Any = residuals._Step
    right, step._branch = step._branch, lambda self: 1 - right(self)
    try:
        return generate(rank, what, layout)
    finally:
        step._branch = right


def sized(what: Asked, size: tuple[int, int]) -> Asked:
    return replace(what, height=size[0], width=size[1], steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sd3 net lora@1", "flux guided net lora@1", "qwen-image net"])
def test_in_bfloat16(ranks: Ranks, source: Source, name: str) -> None:
    """Not near diffusers, where steps are rounded elsewhere, but near float32, and the same on two ranks."""
    what = replace(sized(asked(source, name), (80, 208)), dtype="bfloat16")
    expected = ranks(2).call(generate, what)
    assert str(expected.latents.dtype) == "torch.bfloat16"
    apart = (expected.latents.float() - ranks(2).call(generate, replace(what, dtype=None)).latents).abs()
    assert 0 < float(apart.mean()) < 0.05
    for layout in LAYOUTS[:2]:
        for made in ranks(2).call_all(layout[0], generate, what, layout):
            assert made.difference(expected) == 0, layout
