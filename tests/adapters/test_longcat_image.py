"""LongCat-Image on the kit: the example of docs/writing_an_adapter.md."""

from __future__ import annotations

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest, check_adapter
from tests.adapters.conftest import Kits

# Rewriting a prompt generates 512 tokens.
PLAIN = KitRequest(64, 64, steps=5, sampling={"extra_args": {"enable_prompt_rewrite": False}})
GUIDED = PLAIN.but(height=80, width=112, seed=2, guidance_scale=4.0, negative_prompt="blurry")
REWRITTEN = GUIDED.but(num_images=2, sampling={"extra_args": {"cfg_renorm_min": 0.7}})

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("longcat-image")


def test_on_every_check(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, GUIDED])
    assert report.passed, str(report)


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
