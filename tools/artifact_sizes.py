"""What the artifacts of published image models weigh, computed from the shapes of their fields.

    python tools/artifact_sizes.py

prints the tables of docs/models. Widths are the defaults of the models' classes, which describe the published
checkpoints. A test compares the same computation with artifacts of tiny checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PIXELS_PER_LATENT = 8
PIXELS_PER_TOKEN = 16
LATENT_CHANNELS = 16
CLIP_TOKENS = 77


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One image. ``text_tokens`` are those of T5 or of the caption; the model's numbers are mostly bfloat16."""

    height: int
    width: int
    text_tokens: int
    bytes_per_number: int = 2

    @property
    def tokens(self) -> int:
        return self.height // PIXELS_PER_TOKEN * (self.width // PIXELS_PER_TOKEN)

    @property
    def latent_numbers(self) -> int:
        return LATENT_CHANNELS * (self.height // PIXELS_PER_LATENT) * (self.width // PIXELS_PER_LATENT)


@dataclass(frozen=True, slots=True)
class Widths:
    """Of the embeddings of text tokens, and of the embedding of the whole text."""

    text: int
    pooled: int = 0


Bytes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Family:
    """``measure(request, widths, guided)`` gives bytes by artifact."""

    measure: Callable[[ImageRequest, Widths, bool], Bytes]
    published: Callable[[], Widths]
    tiny_widths: Widths

    def tiny(self, request: ImageRequest, guided: bool) -> Bytes:
        return self.measure(request, self.tiny_widths, guided)


def flux(request: ImageRequest, widths: Widths, guided: bool) -> Bytes:
    positions = 3
    text = request.text_tokens * (widths.text + positions) + widths.pooled
    conditioning = (1 + guided) * text + request.tokens * positions
    return {
        "conditioning": conditioning * request.bytes_per_number,
        "latents": request.latent_numbers * request.bytes_per_number,
    }


def sd3(request: ImageRequest, widths: Widths, guided: bool) -> Bytes:
    text = (CLIP_TOKENS + request.text_tokens) * widths.text + widths.pooled
    return {
        "conditioning": (1 + guided) * text * request.bytes_per_number,
        "latents": request.latent_numbers * request.bytes_per_number,
    }


def z_image(request: ImageRequest, widths: Widths, guided: bool) -> Bytes:
    """Latents are float32 at any dtype of the model; the captions of both branches count as equally long."""
    text = request.text_tokens * widths.text
    return {
        "conditioning": (1 + guided) * text * request.bytes_per_number,
        "latents": request.latent_numbers * 4,
    }


def _defaults(name: str) -> dict[str, Any]:
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def _flux_widths() -> Widths:
    defaults = _defaults("FluxTransformer2DModel")
    return Widths(defaults["joint_attention_dim"], defaults["pooled_projection_dim"])


def _sd3_widths() -> Widths:
    defaults = _defaults("SD3Transformer2DModel")
    return Widths(defaults["joint_attention_dim"], defaults["pooled_projection_dim"])


def _z_image_widths() -> Widths:
    return Widths(_defaults("ZImageTransformer2DModel")["cap_feat_dim"])


FAMILIES = {
    "flux": Family(flux, _flux_widths, Widths(64, 32)),
    "sd3": Family(sd3, _sd3_widths, Widths(64, 64)),
    "z-image": Family(z_image, _z_image_widths, Widths(64)),
}
SIDES = (512, 1024, 2048)
TEXT_TOKENS = {"flux": 512, "sd3": 256, "z-image": 128}


def published_bytes(name: str, side: int, guided: bool) -> Bytes:
    """Of a square image by a published checkpoint of the family."""
    family = FAMILIES[name]
    return family.measure(ImageRequest(side, side, TEXT_TOKENS[name]), family.published(), guided)


def main() -> None:
    sides = " | ".join(f"latents, {side}x{side}" for side in SIDES)
    print(f"| family | text tokens | conditioning, 1024x1024 | with guidance | {sides} |")
    print("|---" * (4 + len(SIDES)) + "|")
    for name in FAMILIES:
        sizes = [published_bytes(name, 1024, guided)["conditioning"] for guided in (False, True)]
        sizes += [published_bytes(name, side, False)["latents"] for side in SIDES]
        cells = " | ".join(f"{size / 1e6:.2f} MB" for size in sizes)
        print(f"| `{name}` | {TEXT_TOKENS[name]} | {cells} |")


if __name__ == "__main__":
    from gfdit.omni.plugin import prepare_cpu_process

    prepare_cpu_process()
    main()
