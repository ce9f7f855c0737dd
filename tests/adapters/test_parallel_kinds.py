"""Every kind of parallelism on six ranks: any degree, with guidance, shared decodes, adapters and cached prompts.

The model has six attention heads: Ulysses takes 1, 2, 3 and 6 ranks, a ring 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, ChildError, KitRequest
from gfdit.core import ParallelSpec
from tests.adapters.conftest import Kits
from tests.adapters.sabotage import forget_a_block
from tests.support.lora import write_adapter

HEADS, HEAD_DIM = 6, 32
PLAIN = KitRequest(96, 96)  # 36 tokens
ODD = KitRequest(112, 112, seed=2)  # 49 tokens: no degree but 1 divides them
GUIDED = KitRequest(112, 144, seed=4, negative_prompt="blurry, low quality", num_images=2)  # 63 tokens
TILED = KitRequest(320, 448, steps=1, seed=5)  # 2 x 3 tiles
# Of pixels between -1 and 1.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def kit(kits: Kits, tiny_model: Callable[..., Path]) -> AdapterKit:
    od_config = {"vae_use_tiling": True, "enable_prompt_embed_cache": True, "max_cpu_loras": 2}
    model = tiny_model("qwen-image", num_heads=HEADS, head_dim=HEAD_DIM)
    return kits(model, num_ranks=6, ring=True, od_config=od_config)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two, of different ranks."""
    folder, width = tmp_path_factory.mktemp("adapters"), HEADS * HEAD_DIM
    one = write_adapter(folder / "one", 1, width=width)
    other = write_adapter(folder / "other", 2, width=width, rank=16)
    return str(one), str(other)


@pytest.fixture(scope="module")
def adapted(adapters: tuple[str, str]) -> list[KitRequest]:
    """The same picture with an adapter, with less of it, with another, and without any."""
    one, other = adapters
    return [ODD.but(lora=lora) for lora in ((one, 1.0), (one, 0.5), (other, 1.0), None)]


@pytest.mark.thorough
def test_all_degrees_are_offered(kit: AdapterKit) -> None:
    alone, guided = kit.candidates(PLAIN), kit.candidates(GUIDED)
    assert alone == tuple(ParallelSpec(sp) for sp in range(1, 7))
    assert set(guided) == {*alone, *(ParallelSpec(sp, 2) for sp in (1, 2, 3))}


@pytest.mark.thorough
@pytest.mark.parametrize("request_", [PLAIN, ODD], ids=str)
def test_every_degree(kit: AdapterKit, request_: KitRequest) -> None:
    (stock,) = kit.stock(request_)
    assert kit.run(request_, "sp1@4").identical(stock)
    scripts = [
        "sp2@5,3",
        "sp3@4,0,2",
        "sp4@1,5,0,3",  # a ring
        "sp5@2,4,1,0,5",  # a ring
        "sp6@0,5,1,4,2,3",
        "encode@5 sp5@0,1,2,3,4 sp3@2,4,1 sp4@3,1,4,2 sp6@0,1,2,3,4,5 decode@3",
    ]
    differences = {script: kit.run(request_, script).difference(stock) for script in scripts}
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.thorough
def test_guidance_with_every_degree(kit: AdapterKit) -> None:
    (stock,) = kit.stock(GUIDED)
    scripts = [
        "cfg2@3,1",
        "cfg2xsp2@3,1,5,0",
        "cfg2xsp3@3,1,5,0,2,4",
        "sp5@4,3,2,1,0",
        "cfg2@0,5 cfg2xsp3@5,4,3,2,1,0 sp4@0,2,4,1 cfg2xsp2@1,2,3,4 decode@5",
    ]
    differences = {script: kit.run(GUIDED, script).difference(stock) for script in scripts}
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.thorough
def test_a_ring_that_merges_wrongly_is_seen(kit: AdapterKit) -> None:
    """Negative control: the last block counts for nothing."""
    (stock,) = kit.stock(PLAIN)
    kit.on_ranks(forget_a_block, True)
    try:
        assert kit.run(PLAIN, "sp4@1,5,0,3").difference(stock) > 50 * TOLERANCE
    finally:
        kit.on_ranks(forget_a_block, False)
    assert kit.run(PLAIN, "sp4@1,5,0,3").difference(stock) <= TOLERANCE


@pytest.mark.thorough
def test_three_ranks_are_bit_identical_to_stock_at_that_degree(kit: AdapterKit) -> None:
    for request, stock in zip((PLAIN, ODD), kit.stock([PLAIN, ODD], ulysses_degree=3), strict=True):
        assert kit.run(request, "sp3@5,1,4").identical(stock), request


@pytest.mark.thorough
def test_a_decode_in_six_tiles(kit: AdapterKit) -> None:
    (stock,) = kit.stock(TILED)
    for ranks in ("4", "1,0", "5,0,3", "0,1,2,3,4,5"):
        assert kit.run(TILED, f"sp1@2 decode@{ranks}").identical(stock), ranks


@pytest.mark.thorough
def test_adapters_take_turns_on_the_same_ranks(kit: AdapterKit, adapted: list[KitRequest]) -> None:
    stock = kit.stock(adapted)
    outputs = kit.run_interleaved([(request, "encode@1 sp1@0 decode@1") for request in adapted])
    # Not bit for bit: buffers are as wide as the largest adapter that a process has seen, so far.
    differences = [output.difference(expected) for output, expected in zip(outputs, stock, strict=True)]
    assert max(differences) <= TOLERANCE, differences
    distances = [one.difference(other) for one in stock for other in stock if one is not other]
    assert min(distances) > 50 * TOLERANCE, "an adapter has no effect"
    changing = "encode@3 prepare@1 sp2@1,0 sp3@0,1,2 sp4@3,1,0,2 decode@0"
    outputs = kit.run_interleaved([(request, changing) for request in adapted])
    differences = [output.difference(expected) for output, expected in zip(outputs, stock, strict=True)]
    assert max(differences) <= TOLERANCE, differences
    assert [len(loaded) for loaded in kit.on_ranks(loaded_adapters)][:4] == [2] * 4


def loaded_adapters(executor: Any) -> list[int]:
    return executor.worker.lora_manager.list_adapters()


@pytest.mark.thorough
def test_a_batch_is_split_by_adapter(kit: AdapterKit, adapted: list[KitRequest]) -> None:
    batched = kit.run_batched(adapted, "sp2@1,0")
    assert set(batched.requests_per_forward) == {1.0}
    assert any("lora" in reason for reason in batched.split_reasons), batched.split_reasons
    for output, stock in zip(batched.outputs, kit.stock(adapted), strict=True):
        assert output.difference(stock) <= TOLERANCE
    alike = [adapted[0], adapted[0].but(seed=12)]
    batched = kit.run_batched(alike, "sp2@1,0")
    assert set(batched.requests_per_forward) == {2.0}, "one adapter: one pass"
    for output, stock in zip(batched.outputs, kit.stock(alike), strict=True):
        assert output.difference(stock) <= TOLERANCE


@pytest.mark.thorough
def test_an_adapter_that_is_not_there_fails_its_request_alone(kit: AdapterKit) -> None:
    with pytest.raises(ChildError, match="no-such-adapter"):
        kit.run(ODD.but(lora=("/no-such-adapter", 1.0)), "sp2@0,1")
    assert kit.run(ODD, "sp1@0").identical(kit.stock(ODD)[0])


@pytest.mark.thorough
def test_embeddings_of_a_prompt_are_made_once_on_a_rank(kit: AdapterKit) -> None:
    request = PLAIN.but(prompt="a heron in the mist, never asked for before", negative_prompt="fog")
    (stock,) = kit.stock(request)
    before = kit.on_ranks(prompt_cache)[4]
    assert kit.run(request, "encode@4 sp1@0").identical(stock)
    first = kit.on_ranks(prompt_cache)[4]
    assert kit.run(request, "encode@4 sp1@2").identical(stock)
    second = kit.on_ranks(prompt_cache)[4]
    assert (first["misses"], second["misses"]) == (before["misses"] + 2, before["misses"] + 2)  # two prompts
    assert second["hits"] == first["hits"] + 2


def prompt_cache(executor: Any) -> dict[str, int]:
    return executor.runner.pipeline._prompt_embed_cache.stats()
