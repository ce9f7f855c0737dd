"""Step caches, elastic: what they keep follows a request, and the ranks of a step agree on what is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters.conftest import Kits

TOLERANCE = 1e-4
TEA_CACHE = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.6}}
# Random weights change more from step to step than trained ones do.
_LIKE = {"max_warmup_steps": 2, "residual_diff_threshold": 0.9, "max_continuous_cached_steps": 2}
CACHE_DIT: dict[str, Any] = {"cache_backend": "cache_dit", "cache_config": _LIKE}
# Without masks, with which stock fails at any degree but 1.
CACHE_DIT_WAN = {**CACHE_DIT, "parallel_config": {"mask_sp_padding": False}}
TAYLOR = {"cache_backend": "cache_dit", "cache_config": {**_LIKE, "enable_taylorseer": True}}
STEP_MASK = {
    "cache_backend": "cache_dit",
    "cache_config": {**_LIKE, "scm_steps_mask_policy": "fast", "scm_steps_policy": "static"},
}

GUIDED = KitRequest(128, 96, seed=1, steps=8, negative_prompt=" ", true_cfg_scale=4.0)
FLUX = KitRequest(128, 96, seed=1, steps=8, guidance_scale=3.5, max_sequence_length=32)
# The solver is always said: for stock the one of the request before is the default.
_SOLVER = {"extra_args": {"sample_solver": "unipc", "flow_shift": 5.0}}
VIDEO = KitRequest(
    96,
    64,
    num_frames=5,
    seed=1,
    steps=8,
    negative_prompt="blurry",
    guidance_scale=4.0,
    max_sequence_length=32,
    sampling=_SOLVER,
)


@dataclass(frozen=True)
class Case:
    """A model with a cache. ``stock_splits``: by the degrees that vLLM-Omni has for it."""

    family: str
    cache: dict[str, Any]
    request: KitRequest
    stock_splits: tuple[str, ...] = ("ulysses_degree", "cfg_parallel_size")
    blocks: str = "transformer.transformer_blocks"


CASES = {
    "tea_cache-qwen-image": Case("qwen-image", TEA_CACHE, GUIDED),
    "tea_cache-flux": Case("flux", TEA_CACHE, FLUX, stock_splits=()),
    "cache_dit-qwen-image": Case("qwen-image", CACHE_DIT, GUIDED),
    "cache_dit-flux": Case("flux", CACHE_DIT, FLUX, stock_splits=()),
    "cache_dit-wan": Case("wan2.2-ti2v", CACHE_DIT_WAN, VIDEO, blocks="transformer.blocks"),
    "cache_dit-wan-a14b": Case("wan2.2-t2v-a14b", CACHE_DIT_WAN, VIDEO, blocks="transformer.blocks"),
    "taylor-qwen-image": Case("qwen-image", TAYLOR, GUIDED),
    "mask-qwen-image": Case("qwen-image", STEP_MASK, GUIDED),
}
THOROUGH = set(CASES) - {"cache_dit-wan"}
_PARAMS = [pytest.param(name, marks=[pytest.mark.thorough] if name in THOROUGH else []) for name in CASES]


@pytest.fixture(scope="module", params=_PARAMS)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def kit(case: Case, kits: Kits) -> Iterator[AdapterKit]:
    """With verdicts, so that guidance can be split."""
    kit = kits(case.family, num_ranks=2, od_config=case.cache)
    (verdict,) = kit.self_test(case.request).values()
    assert verdict.mode is not None, verdict
    yield kit


def test_a_request_alone_is_stocks(kit: AdapterKit, case: Case) -> None:
    request = case.request
    (stock,) = kit.stock(request)
    alone = kit.run(request, "sp1@0")
    assert alone.identical(stock)
    assert num_skipped(kit, case) > 0, "nothing was skipped: the test would prove nothing"
    for script in ("sp1@0 sp1@1", "encode@1 sp1@0 sp1@0 sp1@1"):
        assert kit.run(request, script).identical(stock), script
    for output in kit.run_interleaved([(request, "sp1@0"), (request, "sp1@1 sp1@0")]):
        assert output.identical(stock)


def test_two_ranks_skip_the_same_steps(kit: AdapterKit, case: Case) -> None:
    """Constant degrees are stock's at that degree; others end, and are near."""
    request = case.request
    for degree in case.stock_splits:
        script = {"ulysses_degree": "sp2@0,1", "cfg_parallel_size": "cfg2@1,0"}[degree]
        (stock,) = kit.stock(request, **{degree: 2})
        assert kit.run(request, script).difference(stock) <= TOLERANCE, script
    (alone,) = kit.stock(request)
    for script in ("sp2@0,1 sp2@0,1 sp1@1 sp2@1,0", "sp1@0 sp2@1,0 sp2@1,0"):
        assert kit.run(request, script).difference(alone) < 0.5, script
    both = kit.run_interleaved([(request, "sp2@0,1"), (request.but(seed=5, height=96), "sp2@1,0 sp1@0 sp2@1,0")])
    assert both[0].difference(kit.run(request, "sp2@0,1")) <= TOLERANCE


def num_skipped(kit: AdapterKit, case: Case) -> int:
    """Steps of the last request whose blocks did not run, on rank 0."""
    return kit.on_ranks(count_skips, case.request, case.blocks)[0]


def count_skips(executor: Any, request: KitRequest, blocks: str) -> int:
    """Runs another request, counting calls of the last block against calls of the transformer."""
    counts = {"block": 0, "model": 0}
    pipeline = executor.runner.pipeline

    def count(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            counts[name] += 1

        return hook

    hooks = [
        attrgetter(blocks)(pipeline)[-1].register_forward_pre_hook(count("block")),
        pipeline.transformer.register_forward_pre_hook(count("model")),
    ]
    with executor.alone():
        executor.adapter.run_whole(request.to_omni("counted"))
    for hook in hooks:
        hook.remove()
    return counts["model"] - counts["block"]
