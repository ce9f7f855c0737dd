"""The requests whose images are compared with those of stock vLLM-Omni, which is started once for all of them."""

from __future__ import annotations

from tests.support.images import ImageRequest

PLAIN = ImageRequest(128, 128)
ODD = ImageRequest(144, 144, seed=2)  # 81 tokens: no degree but 1 divides them
GUIDED = ImageRequest(128, 128, seed=3, negative_prompt="blurry")
GUIDED_ODD = ImageRequest(144, 208, seed=4, steps=5, negative_prompt="blurry")
UNALIGNED = ImageRequest(100, 90, seed=5)
TINY = ImageRequest(8, 8, seed=6)
TWO_IMAGES = ImageRequest(128, 96, seed=7, negative_prompt="blurry", num_images=2)
TILED = ImageRequest(320, 304, steps=2, seed=8, negative_prompt="blurry", num_images=2)  # 2 x 2 tiles of its VAE
ALL = (PLAIN, ODD, GUIDED, GUIDED_ODD, UNALIGNED, TINY, TWO_IMAGES)

# Of random traffic.
TRAFFIC = (
    ImageRequest(128, 128, steps=5, seed=11),
    ImageRequest(144, 144, steps=4, seed=12),
    ImageRequest(96, 160, steps=6, seed=13, negative_prompt="blurry"),
    ImageRequest(208, 144, steps=3, seed=14, negative_prompt="blurry"),
)
