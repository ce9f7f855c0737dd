"""Published models' sizes, and small ones in their place where kernels are interpreted."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Model:
    """``tokens`` of image (or video) and, where they are one sequence, text; ``text`` those attended to apart."""

    name: str
    tokens: int
    heads: int
    head_size: int
    mlp: int
    text: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    def small(self) -> Model:
        """With as little of everything as every degree can split."""
        name = f"{self.name}, as small as can be"
        return replace(self, name=name, tokens=16, heads=8, head_size=16, mlp=256, text=min(self.text, 4))


QWEN = Model("Qwen-Image, 1024 x 1024", 4096 + 256, 24, 128, 4 * 3072)
FLUX = Model("FLUX.1, 1024 x 1024", 4096 + 512, 24, 128, 4 * 3072)
# 81 frames are 21 of latents.
WAN_720 = Model("Wan2.2 A14B, 1280 x 720 x 81", 21 * 45 * 80, 40, 128, 13_824, text=512)
WAN_480 = Model("Wan2.2 A14B, 832 x 480 x 81", 21 * 30 * 52, 40, 128, 13_824, text=512)
