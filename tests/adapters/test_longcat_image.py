"""LongCat-Image on the kit: the example of docs/writing_an_adapter.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest, check_adapter
from tests.adapters.conftest import Kits
from tests.adapters.sabotage import count_padding_in_rings
from tools.artifact_sizes import FLOAT32, Asked, LongCatImage

# Rewriting a prompt generates 512 tokens.
PLAIN = KitRequest(64, 64, steps=5, sampling={"extra_args": {"enable_prompt_rewrite": False}})
GUIDED = PLAIN.but(height=80, width=112, seed=2, guidance_scale=4.0, negative_prompt="blurry")
REWRITTEN = GUIDED.but(num_images=2, sampling={"extra_args": {"cfg_renorm_min": 0.7}})

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("longcat-image")


def test_on_every_check(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, GUIDED])
    assert report.passed, str(report)


def test_a_constant_degree_is_that_of_stock_at_that_degree(kit: AdapterKit) -> None:
    """Stock takes only numbers of tokens that divide by it: 16 here. The guided one has 35."""
    for request, degrees, script in (
        (PLAIN, {"ulysses_degree": 2}, "sp2@3,1"),
        (GUIDED, {"cfg_parallel_size": 2}, "cfg2@2,0"),
    ):
        (stock,) = kit.stock([request], **degrees)
        assert kit.run(request, script).identical(stock), script


def test_every_degree(kits: Kits, tiny_model: Callable[..., Path]) -> None:
    """Of six heads: Ulysses takes 2, 3 and 6 ranks, a ring 4 and 5, and 35 tokens divide by 5 alone."""
    kit = kits(tiny_model("longcat-image", num_heads=6), num_ranks=6, ring=True)
    (stock,) = kit.stock([GUIDED])
    for script in (
        "sp3@2,0,1",
        "sp4@1,5,0,3",
        "sp5@2,4,1,0,5",
        "cfg2xsp3@5,1,0,2,4,3",
        "cfg2xsp2@5,1,0,2 sp4@3,1,5,2 sp1@5 sp6@5,4,3,2,1,0 sp5@0,1,2,3,4",
    ):
        assert kit.run(GUIDED, script).difference(stock) <= 1e-4, script
    kit.on_ranks(count_padding_in_rings, True)
    wrong = kit.run(GUIDED, "sp4@1,5,0,3").difference(stock)
    assert wrong > 3e-4, "negative control: one token of padding beside 512 of text"


def test_rewritten_prompts_and_renormalized_guidance(kit: AdapterKit) -> None:
    report = check_adapter(kit, [REWRITTEN], checks=["stock", "sp1", "fresh"], num_scripts=1)
    assert report.passed, str(report)


def test_renormalization_is_not_another_request_s(kit: AdapterKit) -> None:
    """The pipeline keeps the minimum of the last request; steps of different ones must not share a pass."""
    one = GUIDED.but(guidance_scale=60.0)  # so strong that there is something to renormalize
    other = one.but(sampling={"extra_args": {"enable_prompt_rewrite": False, "cfg_renorm_min": 1.0}})
    pair = [(one, "sp1@0"), (other, "sp1@0")]
    alone = [kit.run(*each) for each in pair]
    assert alone[0].difference(alone[1]) > 1e-3, "the minimum matters"
    assert [output.identical(alone[i]) for i, output in enumerate(kit.run_interleaved(pair))] == [True, True]
    batched = kit.run_batched([one, other], "sp1@0")
    assert set(batched.requests_per_forward) == {1.0} and batched.split_reasons
    assert [output.identical(alone[i]) for i, output in enumerate(batched.outputs)] == [True, True]


def test_artifacts_weigh_what_is_computed(kit: AdapterKit) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    asked = Asked(height=80, width=112, text_tokens=512, number=FLOAT32)
    for name, measured in kit.artifact_bytes(GUIDED)["denoise"].items():
        # Besides tensors: the generator, sampling parameters, the scheduler, and the names of it all.
        assert 0 <= sum(measured) - LongCatImage(text_width=64).artifacts(asked)[name] <= 20_000, name
