"""One request of each kind that a family's pipeline takes, small enough to run on a CPU in seconds.

By the name of the checkpoint for `gfdit tiny-model`, then by kind: ``text`` is the plainest, ``guided`` asks the
transformer about a negative prompt too, ``image`` has a picture to edit. The stock pipelines run all of them.
"""

from typing import Any

import numpy as np
from PIL import Image

from gfdit.adapters.testing import KitRequest


def picture(seed: int = 1, width: int = 80, height: int = 64) -> Image.Image:
    """Random colours, smooth."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def left_half(side: int) -> Image.Image:
    """A mask: white is what is painted anew."""
    pixels = np.zeros((side, side), np.uint8)
    pixels[:, : side // 2] = 255
    return Image.fromarray(pixels)


def pictures(**named: Image.Image) -> dict[str, Any]:
    return {"multi_modal_data": named}


TEXT = KitRequest(steps=3)
UNGUIDED = TEXT.but(guidance_scale=1.0)
GUIDED = TEXT.but(negative_prompt="blurry", guidance_scale=4.0)
IMAGE = TEXT.but(images=(picture(),))
KLEIN = TEXT.but(max_sequence_length=64)
# Their own smallest size: 640 x 640 pixels.
LAYERS = TEXT.but(height=None, width=None, images=(picture(width=64),), sampling={"layers": 2, "resolution": 640})

REQUESTS: dict[str, dict[str, KitRequest]] = {
    "anima": {
        "text": UNGUIDED,
        "guided": GUIDED,
    },
    "ernie-image": {
        "text": UNGUIDED,
        "guided": TEXT.but(guidance_scale=4.0),  # it takes no negative prompt, the empty one is its own
    },
    "flux-kontext": {
        "text": TEXT.but(max_sequence_length=32),
        "image": IMAGE,
        "guided": IMAGE.but(negative_prompt="blurry", true_cfg_scale=4.0),
    },
    "flux2": {
        "text": TEXT,
        "image": IMAGE,
        "images": TEXT.but(images=(picture(), picture(2, 64, 96)), max_sequence_length=256),
        "guided": GUIDED.but(max_sequence_length=256),
    },
    "flux2-klein": {
        "text": KLEIN,
        "image": KLEIN.but(images=(picture(),)),
        "guided": KLEIN.but(guidance_scale=4.0),  # as for ERNIE-Image
        # Half of the steps that are asked for: the picture is a start.
        "mask": KLEIN.but(
            steps=4,
            sampling={"strength": 0.5},
            prompt_fields=pictures(image=picture(1, 128, 128), mask_image=left_half(128)),
        ),
        "mask and reference": KLEIN.but(
            prompt_fields=pictures(
                image=picture(1, 128, 128), mask_image=left_half(128), reference_image=picture(2, 64, 96)
            ),
        ),
    },
    "krea2": {
        "guided": GUIDED,
    },
    "krea2-turbo": {
        "text": TEXT,
    },
    "longcat-image-edit": {
        "image": IMAGE.but(guidance_scale=1.0),
        "guided": IMAGE.but(negative_prompt="blurry", guidance_scale=4.0),
    },
    "ovis-image": {
        "text": UNGUIDED,
        "guided": GUIDED,
    },
    "qwen-image-layered": {
        "image": LAYERS,
        "guided": LAYERS.but(negative_prompt="blurry", true_cfg_scale=4.0),
    },
    "sdxl": {
        "text": UNGUIDED,
        "guided": GUIDED,
    },
    "stable-audio": {
        "text": UNGUIDED,
        "guided": TEXT.but(guidance_scale=7.0),  # against no text at all
        "guided by text": GUIDED,
    },
}
