"""How many ranks a decode can use: a VAE that decodes in tiles shares them out."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core.layouts import SINGLE, ParallelSpec
from gfdit.core.tasks import Shape


@dataclass(frozen=True, slots=True)
class Tiling:
    """Height and width of a tile and the distance from one tile to the next, in pixels of the output."""

    tile: tuple[int, int]
    stride: tuple[int, int]

    def num_tiles(self, shape: Shape) -> int:
        """1 for what fits a tile: it is decoded in one piece."""
        size = (shape.height, shape.width)
        if all(side <= tile for side, tile in zip(size, self.tile, strict=True)):
            return 1
        rows, columns = (-(-side // stride) for side, stride in zip(size, self.stride, strict=True))
        return rows * columns

    def candidates(self, shape: Shape, num_ranks: int) -> tuple[ParallelSpec, ...]:
        """Specifications of a decode task, narrowest first: each has fewer tiles per rank than those before."""
        num_tiles = self.num_tiles(shape)
        shares = [-(-num_tiles // size) for size in range(1, num_ranks + 1)]
        return tuple(
            ParallelSpec(size) for size, share in enumerate(shares, 1) if size == 1 or share < shares[size - 2]
        )


def decode_candidates(tiling: Tiling | None, shape: Shape, num_ranks: int) -> tuple[ParallelSpec, ...]:
    """Of a task that decodes ``shape``, by a VAE with ``tiling`` (None: in one piece) on at most ``num_ranks``."""
    return tiling.candidates(shape, num_ranks) if tiling else (SINGLE,)
