"""One request of each kind that a family's pipeline takes, small enough to run on a CPU in seconds.

By the name of the checkpoint for `gfdit tiny-model`, then by kind: ``text`` is the plainest, ``guided`` calls the
transformer with a negative prompt too, ``image`` has an image to start from or to edit.
"""

import numpy as np
from PIL import Image

from gfdit.adapters.testing import KitRequest


def picture(seed: int = 1, width: int = 80, height: int = 64) -> Image.Image:
    """Random colours, smooth."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


TEXT = KitRequest(steps=3)
LAYERS = TEXT.but(
    height=None, width=None, images=(picture(width=64, height=64),), sampling={"layers": 2, "resolution": 640}
)

REQUESTS: dict[str, dict[str, KitRequest]] = {
    "flux-kontext": {
        "text": TEXT.but(max_sequence_length=32),
        "image": TEXT.but(images=(picture(),)),
        "guided": TEXT.but(images=(picture(),), negative_prompt="blurry", true_cfg_scale=4.0),
    },
    "flux2": {
        "text": TEXT,
        "image": TEXT.but(images=(picture(),)),
        "images": TEXT.but(images=(picture(), picture(2, 64, 96)), max_sequence_length=256),
        "guided": TEXT.but(negative_prompt="blurry", guidance_scale=4.0, max_sequence_length=256),
    },
    "flux2-klein": {
        "text": TEXT.but(max_sequence_length=64),
        "image": TEXT.but(images=(picture(),), max_sequence_length=64),
        "guided": TEXT.but(guidance_scale=4.0, max_sequence_length=64),
    },
    "krea2": {
        "guided": TEXT.but(negative_prompt="blurry", guidance_scale=4.0),
    },
    "krea2-turbo": {
        "text": TEXT,
    },
    "longcat-image-edit": {
        "image": TEXT.but(images=(picture(),), guidance_scale=1.0),
        "guided": TEXT.but(images=(picture(),), negative_prompt="blurry", guidance_scale=4.0),
    },
    "qwen-image-layered": {
        # The pipeline's own smallest size: 640 x 640 pixels, cut by 64 into tokens.
        "image": LAYERS,
        "guided": LAYERS.but(negative_prompt="blurry", true_cfg_scale=4.0),
    },
    "ernie-image": {
        "text": TEXT.but(guidance_scale=1.0),
        "guided": TEXT.but(guidance_scale=4.0),
    },
    "stable-audio": {
        "text": TEXT.but(guidance_scale=1.0),
        "guided": TEXT.but(guidance_scale=7.0),
        "guided by text": TEXT.but(guidance_scale=7.0, negative_prompt="noise"),
    },
    "anima": {
        "text": TEXT.but(guidance_scale=1.0),
        "guided": TEXT.but(negative_prompt="blurry", guidance_scale=4.0),
    },
    "ovis-image": {
        "text": TEXT.but(guidance_scale=1.0),
        "guided": TEXT.but(negative_prompt="blurry", guidance_scale=4.0),
    },
    "sdxl": {
        "text": TEXT.but(guidance_scale=1.0),
        "guided": TEXT.but(negative_prompt="blurry", guidance_scale=5.0),
    },
}
