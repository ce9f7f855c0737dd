"""TeaCache, elastic: what it keeps follows a request, and the ranks of a step agree on whether it is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters.conftest import Kits

TOLERANCE = 1e-4
CACHED = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.6}}
REQUESTS = {
    "qwen-image": KitRequest(128, 96, seed=1, steps=8, negative_prompt=" ", true_cfg_scale=4.0),
    "flux": KitRequest(128, 96, seed=1, steps=8, guidance_scale=3.5, max_sequence_length=32),
}


@pytest.fixture(scope="module", params=REQUESTS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kit(family: str, kits: Kits) -> Iterator[AdapterKit]:
    """With verdicts, so that guidance can be split."""
    kit = kits(family, num_ranks=2, od_config=CACHED)
    (verdict,) = kit.self_test(REQUESTS[family]).values()
    assert verdict.mode is not None, verdict
    yield kit


def test_a_request_alone_is_stocks(kit: AdapterKit, family: str) -> None:
    request = REQUESTS[family]
    (stock,) = kit.stock(request)
    alone = kit.run(request, "sp1@0")
    assert alone.identical(stock)
    assert num_skipped(kit) > 0, "nothing was skipped: the test would prove nothing"
    for script in ("sp1@0 sp1@1", "encode@1 sp1@0 sp1@0 sp1@1"):
        assert kit.run(request, script).identical(stock), script
    for output in kit.run_interleaved([(request, "sp1@0"), (request, "sp1@1 sp1@0")]):
        assert output.identical(stock)


def test_two_ranks_skip_the_same_steps(kit: AdapterKit, family: str) -> None:
    """Constant degrees are stock's at that degree; others end, and are near."""
    request = REQUESTS[family]
    if family == "qwen-image":  # of FLUX, stock has no sequence parallelism
        (stock,) = kit.stock(request, ulysses_degree=2)
        assert kit.run(request, "sp2@0,1").difference(stock) <= TOLERANCE
        (stock,) = kit.stock(request, cfg_parallel_size=2)
        assert kit.run(request, "cfg2@1,0").difference(stock) <= TOLERANCE
    (alone,) = kit.stock(request)
    for script in ("sp2@0,1 sp2@0,1 sp1@1 sp2@1,0", "sp1@0 sp2@1,0 sp2@1,0"):
        assert kit.run(request, script).difference(alone) < 0.5, script
    both = kit.run_interleaved([(request, "sp2@0,1"), (request.but(seed=5, height=96), "sp2@1,0 sp1@0 sp2@1,0")])
    assert both[0].difference(kit.run(request, "sp2@0,1")) <= TOLERANCE


def num_skipped(kit: AdapterKit) -> int:
    """Steps of the last request whose blocks did not run, on rank 0."""
    return kit.on_ranks(count_skips)[0]


def count_skips(executor: Any) -> int:
    """Runs another request, counting calls of the first block against calls of the transformer."""
    counts = {"block": 0, "model": 0}
    transformer = executor.runner.pipeline.transformer
    request = KitRequest(128, 96, seed=1, steps=8, guidance_scale=3.5, max_sequence_length=32)

    def count(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            counts[name] += 1

        return hook

    hooks = [
        transformer.transformer_blocks[0].register_forward_pre_hook(count("block")),
        transformer.register_forward_pre_hook(count("model")),
    ]
    with executor.alone():
        executor.adapter.run_whole(request.to_omni("counted"))
    for hook in hooks:
        hook.remove()
    return counts["model"] - counts["block"]
