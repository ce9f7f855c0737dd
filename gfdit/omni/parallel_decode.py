"""Decoding in tiles, by all ranks of the decode task together.

With tiling on (vLLM-Omni's ``vae_use_tiling``) a VAE decodes an image or a video in overlapping tiles and blends
them. Its tiles are independent, and vLLM-Omni shares them out in an executor of the VAE, over a process group of
all workers. A stand-in for that executor answers for the running decode task instead: every rank of the task
decodes its tiles, the first one gets them and blends. Only the ranks differ, so the result is bit for bit that of
one rank.

Without tiling nothing is offered: a decode in one piece is another computation, with other rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor import (
    DistributedOperator,
    DistributedVaeExecutor,
    DistributedVaeMixin,
)

from gfdit.comm.gather import gather_to_first
from gfdit.core.tiling import Tiling
from gfdit.omni.task_scope import TaskScope


class TileExecutor(DistributedVaeExecutor):
    """Takes the place of a VAE's ``distributed_executor``: over the ordered ranks of the running decode task."""

    parallel_mode = "tile"

    def __init__(self, scope: TaskScope) -> None:
        # Not the base's, which asks torch.distributed for the group.
        self._scope = scope

    @property
    def world_size(self) -> int:
        return len(self._scope.decode.ranks)

    parallel_size = world_size

    @property
    def rank(self) -> int:
        return self._scope.decode.index

    @property
    def group(self) -> Any:
        raise AttributeError(
            "the process group of the VAE is not available under gfdit: only decoding in tiles can be shared"
        )

    def execute(
        self, z: torch.Tensor, operator: DistributedOperator, broadcast_result: bool = True
    ) -> torch.Tensor:
        """What ``operator`` makes of ``z``, which every rank of the task has.

        The first rank owns the result. With ``broadcast_result`` the others get it too, else a tensor of its shape
        and dtype that nobody has written to: what a pipeline does with the result goes through on every rank.
        """
        group = self._scope.decode
        tiles, grid = operator.split(z)
        shares = self._balance_tasks(tiles, len(group))
        decoded = [operator.exec(tile) for tile in shares[group.index]]
        counts = [len(share) for share in shares]
        gathered = gather_to_first(self._scope.comm, decoded, counts, group)
        if gathered is None:
            return self._received(z, decoded, broadcast_result)
        by_place = {
            tile.grid_coord: tensor
            for share, tensors in zip(shares, gathered, strict=True)
            for tile, tensor in zip(share, tensors, strict=True)
        }
        result = operator.merge(by_place, grid)
        self._send_shape(result)
        if broadcast_result:
            self._scope.comm.broadcast(result, group.ranks[0], group)
        return result

    def _send_shape(self, result: torch.Tensor) -> None:
        shape = torch.tensor(result.shape, dtype=torch.int64, device=result.device)
        self._scope.comm.broadcast(shape, self._scope.decode.ranks[0], self._scope.decode)

    def _received(self, z: torch.Tensor, decoded: list[torch.Tensor], broadcast_result: bool) -> torch.Tensor:
        """On a rank that is not the first. The result has as many dimensions as ``z``, and the dtype of tiles."""
        comm, group = self._scope.comm, self._scope.decode
        shape = torch.empty(z.ndim, dtype=torch.int64, device=z.device)
        comm.broadcast(shape, group.ranks[0], group)
        comm.synchronize()  # a shape that did not arrive is anything
        result = z.new_empty(shape.tolist(), dtype=decoded[0].dtype if decoded else z.dtype)
        if broadcast_result:
            comm.broadcast(result, group.ranks[0], group)
        return result


def share_tiles(pipeline: Any, scope: TaskScope) -> Tiling | None:
    """Let the VAE of a loaded pipeline share its tiles; None, and nothing changed, for one that cannot.

    That is a VAE without tiling, with an executor of its own, or of tiles that are not known here.
    """
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, DistributedVaeMixin) or not getattr(vae, "use_tiling", False):
        return None
    if type(getattr(vae, "distributed_executor", None)) is not DistributedVaeExecutor:
        return None
    tiling = tiling_of(vae)
    if tiling is not None:
        vae.distributed_executor = TileExecutor(scope)
        vae.is_distributed_enabled = lambda: len(scope.decode.ranks) > 1 and vae.use_tiling
    return tiling


def tiling_of(vae: Any) -> Tiling | None:
    """Diffusers' VAEs say it in three ways: strides, or overlaps of rectangles or of squares."""
    sides = [_side(vae, name) for name in ("height", "width")]
    known = [side for side in sides if side is not None]
    if len(known) != len(sides):
        return None
    (tile_height, stride_height), (tile_width, stride_width) = known
    return Tiling((tile_height, tile_width), (stride_height, stride_width))


def _side(vae: Any, name: str) -> tuple[int, int] | None:
    """(tile, stride) in pixels along one side."""
    tile = getattr(vae, f"tile_sample_min_{name}", None) or getattr(vae, "tile_sample_min_size", None)
    stride = getattr(vae, f"tile_sample_stride_{name}", None)
    latent = getattr(vae, f"tile_latent_min_{name}", None) or getattr(vae, "tile_latent_min_size", None)
    overlap = getattr(vae, "tile_overlap_factor", None)
    if stride is None and latent and overlap is not None:
        stride = int(latent * (1 - overlap)) * (tile // latent) if tile else None
    return (int(tile), int(stride)) if tile and stride else None
