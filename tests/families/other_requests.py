"""One request of each kind that a family's pipeline takes: videos, and families that came later.

By the name of the checkpoint for `gfdit tiny-model`, then by kind: ``text`` is the plainest, ``guided`` calls the
transformer with a negative prompt too, ``image`` has an image to start from or to edit.
"""

from typing import Any

import numpy as np
from PIL import Image

from gfdit.adapters.testing import KitRequest


def picture(seed: int = 1, width: int = 64, height: int = 64) -> Image.Image:
    """Random colours, smooth."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


#: Whether a guidance scale is the request's own or the default is a field of its own in vLLM-Omni.
GIVEN = {"guidance_scale_provided": True}
VIDEO = KitRequest(
    height=64, width=64, num_frames=5, steps=3, max_sequence_length=32, guidance_scale=1.0, sampling=GIVEN
)
GUIDED_VIDEO = VIDEO.but(guidance_scale=4.0, negative_prompt="blurry")
IMAGE = KitRequest(steps=3, guidance_scale=1.0, sampling=GIVEN)
GUIDED_IMAGE = IMAGE.but(guidance_scale=4.0, negative_prompt="blurry")
PYRAMID: dict[str, Any] = {"is_enable_stage2": True, "pyramid_num_inference_steps_list": [2, 1, 1]}
SANA = GIVEN | {"extra_args": {"use_resolution_binning": False}}  # or it makes all videos as large as 480p

# What a language model says before the denoising starts: a token for each 16 x 16 pixels.
PRIOR: dict[str, Any] = {"prior_token_ids": [7 * i % 64 for i in range(64)]}
VIDEO_ASKED: dict[str, Any] = {"modalities": ["video"]}
LTX2 = VIDEO.but(height=128, width=128, num_frames=9)
# LTX-2 also guides away from a call without the other stream, and from one with blocks that attend to nothing.
ALONE: dict[str, Any] = {
    "video_stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "video_modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}
PERTURBED: dict[str, Any] = {"video_stg_blocks": [1], "audio_stg_blocks": [1]}

REQUESTS: dict[str, dict[str, KitRequest]] = {
    "boogu-image": {
        "text": IMAGE,
        "guided": GUIDED_IMAGE,
        "image": IMAGE.but(images=(picture(),)),
        "guided by image": GUIDED_IMAGE.but(
            images=(picture(),), guidance_scale_2=2.0, sampling=GIVEN | {"guidance_scale_2_provided": True}
        ),
    },
    "boogu-image-turbo": {
        "text": IMAGE,
        "image": IMAGE.but(images=(picture(),)),
    },
    "glm-image": {
        "text": IMAGE.but(prompt="a red panda and 'hello'", sampling=GIVEN | {"extra_args": PRIOR}),
        "guided": GUIDED_IMAGE.but(sampling=GIVEN | {"extra_args": PRIOR}),
    },
    "helios-pyramid": {
        "text": VIDEO.but(num_frames=33, sampling=GIVEN | {"extra_args": PYRAMID}),
        "guided": GUIDED_VIDEO.but(num_frames=33, sampling=GIVEN | {"extra_args": PYRAMID}),
    },
    "hidream-image": {
        "text": IMAGE,
        "guided": GUIDED_IMAGE,
    },
    "hunyuan-video15": {
        "text": VIDEO.but(prompt='a red panda and "hello"'),
        # Random weights let the prompt say little here: loud, so that a video without it differs.
        "guided": GUIDED_VIDEO.but(guidance_scale=100.0),
    },
    "hunyuan-video15-i2v": {
        "image": VIDEO.but(images=(picture(),)),
        "guided": GUIDED_VIDEO.but(images=(picture(),), guidance_scale=100.0),
    },
    "lingbot-video": {
        "text": VIDEO.but(prompt_fields=VIDEO_ASKED),
        "guided": GUIDED_VIDEO.but(prompt_fields=VIDEO_ASKED),
        "one frame": IMAGE.but(prompt_fields={"modalities": ["image"]}),
        "image": VIDEO.but(images=(picture(),), prompt_fields=VIDEO_ASKED),
    },
    "ltx2": {
        "text": LTX2.but(sampling=GIVEN | {"extra_args": ALONE}),
        "guided": LTX2.but(
            guidance_scale=3.0, negative_prompt="blurry", sampling=GIVEN | {"extra_args": PERTURBED}
        ),
        "image": LTX2.but(images=(picture(),), sampling=GIVEN | {"extra_args": ALONE}),
    },
    "ltx2-distilled": {
        "text": LTX2.but(steps=8),
    },
    "ltx2-dmd2": {
        "text": LTX2.but(steps=4),
    },
    "lumina2": {
        "text": IMAGE,
        "guided": GUIDED_IMAGE,
    },
    "omnigen2": {
        "text": IMAGE,
        "guided": GUIDED_IMAGE,
        "image": IMAGE.but(images=(picture(),)),
        "guided by image": GUIDED_IMAGE.but(images=(picture(), picture(2, 96, 64)), guidance_scale_2=2.0),
    },
    "sana-video": {
        "text": VIDEO.but(sampling=SANA),
        "guided": GUIDED_VIDEO.but(sampling=SANA),
    },
    "sana-video-i2v": {
        "image": VIDEO.but(images=(picture(),), sampling=SANA),
        "guided": GUIDED_VIDEO.but(images=(picture(),), sampling=SANA),
    },
    "wan-dmd": {
        "text": VIDEO,
        "image": VIDEO.but(images=(picture(),)),
    },
    "wan-vace": {
        "text": VIDEO,
        "guided": GUIDED_VIDEO,
        "image": GUIDED_VIDEO.but(images=(picture(),)),
    },
}
#: Further fields of ``OmniDiffusionConfig`` that a family needs; ``{model}`` is the folder of the checkpoint.
OD_CONFIG: dict[str, dict[str, Any]] = {
    "hidream-image": {"auxiliary_text_encoder": "{model}/text_encoder_4", "dtype": "bfloat16"},
    "lumina2": {"diffusion_load_format": "diffusers", "enforce_eager": False},
}
