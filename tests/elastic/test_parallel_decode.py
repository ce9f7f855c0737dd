"""Decoding by tiles on several ranks: the real VAEs, on virtual ranks, against their own tiled decode on one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfdit.comm import CommTimeout, GroupFreeComm, spawn
from gfdit.core import ExecutionLayout, ParallelSpec, Shape
from gfdit.core.tiling import Tiling, decode_candidates
from gfdit.omni.plugin import prepare_cpu_process
from tests.support.thorough import thorough
from tests.support.waiting import HANG_S

# Tiles of 32 pixels, 24 from one to the next: 5 x 4 tiles in 104 x 80 pixels.
TILE, STRIDE, SIZE = 32, 24, (104, 80)


def images() -> Any:
    """Qwen-Image: a causal video VAE with one frame."""
    from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage import (
        DistributedAutoencoderKLQwenImage,
    )

    return rectangles(DistributedAutoencoderKLQwenImage(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 2]))


def videos() -> Any:
    """Wan: the same with frames."""
    from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan import DistributedAutoencoderKLWan

    return rectangles(DistributedAutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 2]))


def squares() -> Any:
    """AutoencoderKL, of SD3 and FLUX: square tiles, and overlaps in place of strides."""
    from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl import DistributedAutoencoderKL

    vae = DistributedAutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = TILE, TILE // 8, 0.25
    return vae


def rectangles(vae: Any) -> Any:
    vae.tile_sample_min_height = vae.tile_sample_min_width = TILE
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = STRIDE
    return vae


VAES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "images": (images, (2, 4, 1)),
    "videos": (videos, (1, 4, 3)),
    "squares": (squares, (2, 4)),
}


def make(name: str) -> Any:
    """The VAE with random weights, ready for tiles as vLLM-Omni makes it: an executor, and tiling on."""
    from vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor import DistributedVaeExecutor

    prepare_cpu_process()
    torch.manual_seed(0)
    vae = VAES[name][0]().eval()
    vae.use_tiling = True
    vae.distributed_executor = DistributedVaeExecutor.__new__(DistributedVaeExecutor)
    vae.distributed_executor.parallel_size = 1
    return vae


def latents(name: str, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((*VAES[name][1], height // 8, width // 8), generator=generator)


class Pipeline:
    def __init__(self, vae: Any) -> None:
        self.vae = vae


class ParallelConfig:
    sequence_parallel_size = 1


def decoded(comm: GroupFreeComm, vaes: list[Any], z: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor | None:
    """What this rank gets of a decode task on ``ranks``; None for the ranks that take no part."""
    from gfdit.omni.parallel_decode import share_tiles
    from gfdit.omni.task_scope import TaskScope

    if comm.rank not in ranks:
        return None
    vae, scope = vaes[comm.rank], TaskScope.alone(comm.rank, comm)
    assert share_tiles(Pipeline(vae), scope) is not None
    layout = ExecutionLayout(ranks, ParallelSpec(len(ranks)))
    with torch.inference_mode(), scope.enter(layout, ParallelConfig(), decode=True):
        return vae.decode(z, return_dict=False)[0]


def run(name: str, z: torch.Tensor, ranks: tuple[int, ...], num_ranks: int = 4) -> list[Any]:
    vae = make(name)
    vaes = [copy.deepcopy(vae) for _ in range(num_ranks)]  # a VAE keeps state while it decodes
    return spawn(decoded, num_ranks, heap="local", args=(vaes, z, ranks), comm_timeout_s=HANG_S, timeout_s=HANG_S)


@cache
def alone(name: str) -> torch.Tensor:
    with torch.inference_mode():
        return make(name).decode(latents(name, *SIZE), return_dict=False)[0]


RANKS = ((0,), (2, 0), (1, 3, 0), (3, 1, 0, 2))
QUICK = {"images": (1, 3, 0), "squares": (3, 1, 0, 2)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(
            name,
            ranks,
            id=f"{name}-{ranks}",
            marks=() if QUICK.get(name) == ranks else pytest.mark.thorough,
        )
        for name in VAES
        for ranks in RANKS
    ],
)
def test_every_degree_gives_the_bits_of_one_rank(name: str, ranks: tuple[int, ...]) -> None:
    z = latents(name, *SIZE)
    expected = alone(name)
    found = run(name, z, ranks)
    assert torch.equal(found[ranks[0]], expected)
    for rank in ranks:
        assert found[rank].shape == expected.shape and found[rank].dtype == expected.dtype


@pytest.mark.parametrize("name", ["images", *thorough(["videos", "squares"])])
def test_more_ranks_than_tiles(name: str) -> None:
    """Nobody offers that; it goes right all the same."""
    z = latents(name, 32, 48)
    # A thread may compute tiles this small with other rounding than the main one: compare threads.
    assert torch.equal(run(name, z, (1, 2, 0, 3))[1], run(name, z, (0,))[0])


def test_a_tile_in_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from gfdit.omni import parallel_decode

    gather = parallel_decode.gather_to_first

    def swapped(*args: Any) -> Any:
        gathered = gather(*args)
        if gathered is not None:
            gathered[0][0], gathered[1][0] = gathered[1][0], gathered[0][0]
        return gathered

    monkeypatch.setattr(parallel_decode, "gather_to_first", swapped)
    z = latents("images", *SIZE)
    assert (run("images", z, (0, 1))[0] - alone("images")).abs().max() > 1e-3


def test_a_shape_that_did_not_arrive_is_not_allocated() -> None:
    """On a device what failed shows once it is waited for, and what was to arrive is anything."""
    from gfdit.omni.parallel_decode import TileExecutor

    def broadcast(x: torch.Tensor, src: int, group: Any) -> None:
        x.fill_(1 << 40)

    def synchronize() -> None:
        raise CommTimeout(1, (0, 1), 1, 0, "compute", "broadcast")

    comm = SimpleNamespace(broadcast=broadcast, synchronize=synchronize)
    scope: Any = SimpleNamespace(comm=comm, decode=SimpleNamespace(ranks=(0, 1), index=1))
    with pytest.raises(CommTimeout):
        TileExecutor(scope)._received(torch.zeros(1, 4, 8, 8), [], broadcast_result=True)


def test_tiling_is_another_computation_than_one_piece() -> None:
    """Why nothing is offered without it."""
    z = latents("images", *SIZE)
    vae = make("images")
    vae.use_tiling = False
    with torch.inference_mode():
        assert (vae.decode(z, return_dict=False)[0] - alone("images")).abs().max() > 1e-4


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize("size", [(32, 32), (40, 32), (104, 80), (80, 200), (24, 96), (96, 96)], ids=str)
def test_tiles_are_counted_as_the_vae_counts_them(name: str, size: tuple[int, int]) -> None:
    from gfdit.omni.parallel_decode import tiling_of

    vae = make(name)
    tiling = tiling_of(vae)
    assert tiling is not None
    is_tiled = max(size) > TILE
    expected = len(vae.tile_split(latents(name, *size))[0]) if is_tiled else 1
    assert tiling.num_tiles(Shape(*size)) == expected


def test_what_cannot_be_shared_is_left_as_it_is() -> None:
    from gfdit.omni.parallel_decode import share_tiles, tiling_of

    scope: Any = None
    untiled = make("images")
    untiled.use_tiling = False
    other = make("images")
    other.distributed_executor = object()
    unknown = make("images")
    for attribute in ("tile_sample_min_height", "tile_sample_stride_height"):
        setattr(unknown, attribute, None)
    for vae in (untiled, other, unknown, torch.nn.Identity(), None):
        executor = getattr(vae, "distributed_executor", None)
        assert share_tiles(Pipeline(vae), scope) is None
        assert getattr(vae, "distributed_executor", None) is executor
    assert decode_candidates(None, Shape(4096, 4096), 8) == (ParallelSpec(),)
    assert tiling_of(untiled) is not None


def test_degrees_are_those_that_shorten_the_longest_share() -> None:
    tiling = Tiling((32, 32), (24, 24))

    def degrees(height: int, width: int, num_ranks: int = 8) -> list[int]:
        return [spec.sp for spec in tiling.candidates(Shape(height, width), num_ranks)]

    assert degrees(32, 32) == [1]
    assert degrees(48, 48) == [1, 2, 4]  # 4 tiles
    assert degrees(72, 72) == [1, 2, 3, 5]  # 9 tiles
    assert degrees(72, 72, 4) == [1, 2, 3]
    assert degrees(104, 80) == [1, 2, 3, 4, 5, 7]  # 20 tiles
