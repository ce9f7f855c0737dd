"""What the artifacts of a Wan2.2 request take, at sizes that nobody here could run: a table in Markdown.

The artifacts are made of tensors without memory, and counted by the codec that the adapters use.

    python tools/wan_artifacts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import torch

from gfdit.core.tasks import Shape
from gfdit.migration.codec import Artifact, FieldCodec

FRAMES_PER_LATENT = 4
MASK_CHANNELS = 4  # of the encoded image of an A14B model: one per frame of a latent frame


@dataclass(frozen=True, slots=True)
class Model:
    """``pixels_per_latent`` along a side; ``image`` is what an image becomes: None, one frame or a whole video."""

    name: str
    channels: int
    pixels_per_latent: int
    image: str | None
    text_width: int = 4096
    text_dtype: torch.dtype = torch.bfloat16


MODELS = (
    Model("TI2V-5B, text", 48, 16, None),
    Model("TI2V-5B, text and image", 48, 16, "frame"),
    Model("T2V-A14B", 16, 8, None),
    Model("I2V-A14B", 16, 8, "video"),
)
SHAPES = (Shape(480, 832, 81), Shape(704, 1280, 81), Shape(720, 1280, 81))


def artifacts(
    model: Model, shape: Shape, *, guided: bool = True, num_text_tokens: int = 512, solver: str = "unipc"
) -> dict[str, Artifact]:
    """Those that are alive between two steps in the middle of a request for one video, without what is small."""
    side = model.pixels_per_latent
    grid = (shape.height // side, shape.width // side)
    num_frames = (shape.num_frames - 1) // FRAMES_PER_LATENT + 1

    def latents(channels: int = model.channels, frames: int = num_frames) -> torch.Tensor:
        return torch.empty((1, channels, frames, *grid), dtype=torch.float32, device="meta")

    def text() -> torch.Tensor:
        return torch.empty((1, num_text_tokens, model.text_width), dtype=model.text_dtype, device="meta")

    made: dict[str, Artifact] = {"conditioning": {"prompt_embeds": text()}, "latents": {"latents": latents()}}
    if guided:
        made["conditioning"]["negative_prompt_embeds"] = text()
    if solver == "unipc":  # of second order, with a corrector
        history = SimpleNamespace(model_outputs=[latents(), latents()], last_sample=latents())
        made["latents"]["scheduler"] = history
    if model.image == "frame":
        made["image"] = {"extra": {"condition": latents(frames=1)}}
    elif model.image == "video":
        made["image"] = {"extra": {"condition": latents(MASK_CHANNELS + model.channels)}}
    return made


def num_bytes(artifact: Artifact) -> int:
    return sum(prod(field.shape) * field.item_bytes for field in FieldCodec().view(artifact).fields)


def main() -> None:
    print("| checkpoint | size | `conditioning` | `image` | `latents` | of them solver history |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for shape in SHAPES:
            if shape.height % (2 * model.pixels_per_latent):
                continue
            made = {name: num_bytes(artifact) for name, artifact in artifacts(model, shape).items()}
            history = made["latents"] - num_bytes(artifacts(model, shape, solver="euler")["latents"])
            cells = [made["conditioning"], made.get("image", 0), made["latents"], history]
            shown = " | ".join(f"{size / 1e6:.1f} MB" if size else "none" for size in cells)
            print(f"| {model.name} | {shape.width}x{shape.height}x{shape.num_frames} | {shown} |")


if __name__ == "__main__":
    main()
