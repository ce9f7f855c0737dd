"""Qwen-Image on the kit, by its stock ``forward``, and by the methods of its step execution."""

from __future__ import annotations

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest, check_adapter
from tests.adapters.conftest import Kits
from tools.artifact_sizes import FLOAT32, Asked, QwenImage

PLAIN = KitRequest(64, 64, steps=5)
ODD = KitRequest(80, 80, steps=6, seed=2)  # 25 tokens: no degree but 1 divides them
GUIDED = KitRequest(128, 128, steps=6, seed=3, negative_prompt="blurry")
GUIDED_ODD = KitRequest(80, 112, steps=6, seed=4, negative_prompt="blurry", true_cfg_scale=3.0)
UNALIGNED = KitRequest(100, 90, steps=3, seed=5)
TWO_IMAGES = KitRequest(64, 48, steps=4, seed=7, negative_prompt="blurry", num_images=2)
BY_HAND = "tests.adapters.by_hand:StepExecutionAdapter"


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("qwen-image")


def test_its_forward(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, GUIDED_ODD], num_scripts=1)
    assert report.passed, str(report)


def test_an_adapter_by_hand(kit: AdapterKit) -> None:
    kit.use_adapter(BY_HAND)
    try:
        report = check_adapter(kit, [TWO_IMAGES], num_scripts=1, checks=["sp1", "fresh", "layouts"])
    finally:
        kit.use_adapter(None)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_its_forward_on_every_shape(kit: AdapterKit) -> None:
    report = check_adapter(kit, [PLAIN, ODD, GUIDED, GUIDED_ODD, UNALIGNED, TWO_IMAGES], num_scripts=6)
    assert report.passed, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("degrees", "scripts"),
    [
        ({"ulysses_degree": 2}, ("sp2@0,1", "sp2@3,1")),
        ({"ulysses_degree": 4}, ("sp4@2,0,3,1",)),
        ({"cfg_parallel_size": 2, "ulysses_degree": 2}, ("cfg2xsp2@1,3,0,2",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_constant_degree_is_bit_identical_to_stock_at_that_degree(
    kit: AdapterKit, degrees: dict[str, int], scripts: tuple[str, ...]
) -> None:
    requests = [GUIDED, GUIDED_ODD]
    for request, stock in zip(requests, kit.stock(requests, **degrees), strict=True):
        for script in scripts:
            assert kit.run(request, script).identical(stock), (request, script)


@pytest.mark.thorough
def test_artifacts_weigh_what_is_computed(kit: AdapterKit) -> None:
    """By the computation that the figures in docs/models/artifacts.md come from."""
    measured = kit.artifact_bytes(GUIDED)["denoise"]
    # Neither branch is padded; the masks are small enough to travel with the rest.
    text, _ = measured["conditioning"]
    asked = Asked(height=128, width=128, text_tokens=text // (64 * FLOAT32) // 2, number=FLOAT32)
    computed = QwenImage(text_width=64).artifacts(asked)
    assert text % (64 * FLOAT32) == 0 and asked.text_tokens > len(GUIDED.prompt)
    for name, sizes in measured.items():
        assert 0 <= sum(sizes) - computed[name] <= 20_000, name
