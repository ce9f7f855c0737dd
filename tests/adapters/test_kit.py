"""The kit itself: every check can fail, and a failure names what is wrong and leaves the kit usable."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from gfdit.adapters.testing import AdapterKit, ChildError, KitRequest, Output, check_adapter
from gfdit.adapters.testing.checks import usual_checks
from tests.adapters import sabotage
from tests.adapters.conftest import Kits

RARELY = partial(pytest.param, marks=pytest.mark.thorough)
PLAIN = KitRequest(64, 64, steps=6)  # more than there are ranks: some rank is used again
GUIDED = KitRequest(64, 64, steps=4, seed=3, negative_prompt="blurry", true_cfg_scale=4.0)


@pytest.fixture(scope="module")
def kit(kits: Kits) -> AdapterKit:
    return kits("qwen-image")


@pytest.mark.parametrize(
    ("adapter", "request_", "check", "told"),
    [
        (sabotage.StaleLatents, PLAIN, "sp1", "bits must be the same"),
        (sabotage.InPlace, PLAIN, "migration", "changes its input"),
        (sabotage.OnThePipeline, GUIDED, "fresh", "seen no request"),
        (sabotage.Deaf, PLAIN, "batched", "nobody says why"),
        RARELY(sabotage.StaleLatents, PLAIN, "layouts", "differs by"),
        RARELY(sabotage.OnThePipeline, GUIDED.but(true_cfg_scale=2.0), "sp1", "bits must be the same"),
        RARELY(sabotage.FailsInTheMiddle, PLAIN, "layouts", "planted failure"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_check_sees_a_planted_error(
    kit: AdapterKit, adapter: type, request_: KitRequest, check: str, told: str
) -> None:
    kit.use_adapter(f"{adapter.__module__}:{adapter.__name__}")
    try:
        report = check_adapter(kit, [request_], checks=[check], num_scripts=1)
    finally:
        kit.use_adapter(None)
    assert not report.passed and told in str(report), str(report)
    assert kit.run(request_, "sp2@0,1").finite and not any(kit.held()), "the kit goes on after a failure"


def test_a_degree_that_is_not_announced_is_seen(kit: AdapterKit) -> None:
    kit.on_ranks(sabotage.announce_degree, False)
    try:
        report = check_adapter(kit, [PLAIN], checks=["layouts"], num_scripts=1)
    finally:
        kit.on_ranks(sabotage.announce_degree, True)
    assert not report.passed and "differs by" in str(report), str(report)
    assert check_adapter(kit, [PLAIN], checks=["layouts"], num_scripts=1).passed


def test_who_uses_the_kit_need_not_import_vllm_omni() -> None:
    """It takes half a minute on a busy machine; the processes of a kit share the import."""
    code = "import sys\nsys.modules.update(vllm=None, vllm_omni=None)\nimport gfdit.adapters.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_batches_are_counted(kit: AdapterKit) -> None:
    batched = kit.run_batched([PLAIN, PLAIN.but(seed=2), PLAIN.but(seed=3, steps=8)], "sp2@1,0")
    assert batched.requests_per_forward == (3.0,) * 6 and not batched.split_reasons
    split = kit.run_batched([GUIDED, GUIDED.but(seed=2, true_cfg_scale=2.0)], "sp1@0")
    assert split.requests_per_forward == (1.0,) * 4
    assert "true_cfg_scale" in split.split_reasons[0]


def test_artifacts_are_sized(kit: AdapterKit) -> None:
    sizes = kit.artifact_bytes(GUIDED)
    assert set(sizes["encode"]) == set(sizes["denoise"]) == {"conditioning", "latents"}
    assert sizes["decode"] == {}
    assert sum(sizes["denoise"]["latents"]) >= 16 * 64 * 4, "16 tokens of 64 channels in float32"
    tensors, metadata = sizes["denoise"]["conditioning"]
    assert tensors >= len(GUIDED.prompt) * 64 * 4 and metadata > 0


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("sp3@0,1,2", "denoise cannot run at sp3; allowed: sp1, sp2, sp4"),
        ("cfg2@0,1", "denoise cannot run at cfg2xsp1"),
        ("sp2@0,4", "does not name 2 of 4 ranks"),
        ("encode@1", "no script with a layout for steps"),
    ],
)
def test_a_bad_script_is_named(kit: AdapterKit, script: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kit.run(PLAIN, script)


def test_a_request_that_the_adapter_refuses(kit: AdapterKit) -> None:
    with pytest.raises(ChildError, match="height must be between"):
        kit.run(PLAIN.but(height=1_000_000), "sp1@0")


def test_distances_of_outputs() -> None:
    one = Output({"media": np.zeros((2, 2), np.float32), "none": np.zeros(0)})
    other = Output({"media": np.array([[0, 0], [0, 2]], np.float32), "none": np.zeros(0)})
    assert one.distance(other) == 1.0 and one.difference(other) == 2.0
    assert one.distance(Output({"media": np.zeros((2, 3), np.float32), "none": np.zeros(0)})) == np.inf
    assert one.distance(Output({"media": np.full((2, 2), np.nan, np.float32), "none": np.zeros(0)})) == np.inf


def test_where_rounding_is_coarse_the_spread_of_stock_takes_the_place_of_a_tolerance() -> None:
    assert {"layouts", "batched"} <= set(usual_checks("float32")) and "spread" not in usual_checks("float32")
    assert {"sp1", "spread"} <= set(usual_checks("bfloat16")) and "layouts" not in usual_checks("bfloat16")


def test_an_unknown_check_is_named(kit: AdapterKit) -> None:
    with pytest.raises(ValueError, match="no check 'speed'; known: stock"):
        check_adapter(kit, [PLAIN], checks=["speed"])
