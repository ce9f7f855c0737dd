"""What the artifacts of published models weigh, computed from the shapes of their tensors.

    python tools/artifact_sizes.py            # the table of docs/models/artifacts.md
    python tools/artifact_sizes.py --check    # whether the file has it

Counted are the large tensors between two steps, in the middle of a request for one image or video. Tests compare
the same computation with artifacts of tiny checkpoints, and the widths with those that diffusers gives the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

FLOAT32, BFLOAT16, INT64 = 4, 2, 8
POSITION_AXES = 3
DOC = Path(__file__).parents[1] / "docs" / "models" / "artifacts.md"

#: Bytes by artifact. ``IMAGE`` is what of the conditioning is of an input image, ``SOLVER`` what of the latents is
#: the solver's history.
Bytes = dict[str, int]
IMAGE, SOLVER = "image", "solver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One image or video. ``text_tokens`` are those of one branch of guidance.

    ``number`` are the bytes of one number of the model.
    """

    height: int
    width: int
    text_tokens: int
    num_frames: int = 1
    guided: bool = True
    number: int = BFLOAT16

    @property
    def branches(self) -> int:
        return 1 + self.guided

    def places(self, pixels: int) -> int:
        """Squares of so many pixels a side."""
        return self.height // pixels * (self.width // pixels)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.num_frames}" if self.num_frames > 1 else "")


class Model(Protocol):
    """Fields are what differs between checkpoints of a family; the defaults are a published one's."""

    def artifacts(self, asked: Asked) -> Bytes: ...


@dataclass(frozen=True, slots=True)
class QwenImage:
    """Edits have latents of all their input images together: 4096 tokens each, whatever its size.

    The request has the images for either encoder, of 1024 x 1024 pixels: as bytes, and as float32.
    """

    text_width: int = 3584
    pixels_per_token: int = 16
    channels: int = 64
    image_tokens: int = 0

    def artifacts(self, asked: Asked) -> Bytes:
        per_token = self.channels * asked.number
        text = asked.branches * asked.text_tokens * (self.text_width * asked.number + INT64)  # and mask
        image = self.image_tokens * per_token + (3 * 1024**2 * (FLOAT32 + 1) if self.image_tokens else 0)
        latents = asked.places(self.pixels_per_token) * per_token
        return {"conditioning": text + image, "latents": latents} | ({IMAGE: image} if image else {})


@dataclass(frozen=True, slots=True)
class Flux:
    text_width: int = 4096
    pooled_width: int = 768

    def artifacts(self, asked: Asked) -> Bytes:
        text = asked.text_tokens * (self.text_width + POSITION_AXES) + self.pooled_width
        return {
            "conditioning": asked.branches * text * asked.number,
            "latents": 16 * asked.places(8) * asked.number,
        }


@dataclass(frozen=True, slots=True)
class StableDiffusion3:
    text_width: int = 4096
    pooled_width: int = 2048
    clip_tokens: int = 77

    def artifacts(self, asked: Asked) -> Bytes:
        text = (self.clip_tokens + asked.text_tokens) * self.text_width + self.pooled_width
        return {
            "conditioning": asked.branches * text * asked.number,
            "latents": 16 * asked.places(8) * asked.number,
        }


@dataclass(frozen=True, slots=True)
class ZImage:
    """Latents are float32 at any type of the model; the captions of both branches count as equally long."""

    text_width: int = 2560

    def artifacts(self, asked: Asked) -> Bytes:
        return {
            "conditioning": asked.branches * asked.text_tokens * self.text_width * asked.number,
            "latents": 16 * asked.places(8) * FLOAT32,
        }


@dataclass(frozen=True, slots=True)
class LongCatImage:
    """Positions of the text are float32."""

    text_width: int = 3584

    def artifacts(self, asked: Asked) -> Bytes:
        positions = POSITION_AXES * FLOAT32
        text = asked.text_tokens * (self.text_width * asked.number + positions)
        return {
            "conditioning": asked.branches * text,
            "latents": 16 * asked.places(8) * asked.number,
        }


@dataclass(frozen=True, slots=True)
class Wan:
    """``image`` is what an image is encoded as: nothing, one latent ``frame``, or a whole ``video``.

    Of that mean and variance travel, and the image of the request. ``history`` counts the latents that the solver
    keeps: UniPC of second order two outputs and the last sample.
    """

    channels: int
    pixels_per_latent: int
    image: str | None = None
    text_width: int = 4096
    history: int = 3

    def artifacts(self, asked: Asked) -> Bytes:
        places = asked.places(self.pixels_per_latent)
        frames = (asked.num_frames - 1) // 4 + 1
        latents = self.channels * frames * places * FLOAT32
        text = asked.branches * asked.text_tokens * self.text_width * asked.number
        encoded = {None: 0, "frame": 1, "video": frames}[self.image]
        image = 2 * self.channels * encoded * places * FLOAT32 + (3 * asked.height * asked.width if encoded else 0)
        made = {
            "conditioning": text + image,
            "latents": (1 + self.history) * latents,
            SOLVER: self.history * latents,
        }
        return made | ({IMAGE: image} if image else {})


@dataclass(frozen=True, slots=True)
class Helios:
    """In the last chunk, of a request without a pyramid; latents are always float32.

    The solver gives two, and keeps two predictions and the last sample. Of every chunk before there is what it
    gave last, and what was decoded.
    """

    text_width: int = 4096
    frames_per_chunk: int = 33
    latents_per_chunk: int = 9

    def artifacts(self, asked: Asked) -> Bytes:
        chunk = self.latents_per_chunk * 16 * asked.places(8) * FLOAT32
        chunks = -(-asked.num_frames // self.frames_per_chunk)
        return {
            "conditioning": asked.branches * asked.text_tokens * self.text_width * asked.number,
            "latents": (2 + 3 + 3 * (chunks - 1)) * chunk,
            SOLVER: 3 * chunk,
        }


def images(text_tokens: int) -> list[Asked]:
    return [Asked(height=side, width=side, text_tokens=text_tokens) for side in (512, 1024, 2048)]


def videos(*shapes: tuple[int, int, int], text_tokens: int = 512) -> list[Asked]:
    return [Asked(height=h, width=w, num_frames=f, text_tokens=text_tokens) for h, w, f in shapes]


SMALL, MEDIUM, LARGE = (480, 832, 81), (704, 1280, 81), (720, 1280, 81)
HELIOS = tuple((height, width, frames) for height, width in ((384, 640), (768, 1280)) for frames in (33, 132))
#: Published checkpoints, and what they are asked for. The text tokens of those that do not pad are assumptions.
PUBLISHED: dict[str, tuple[Model, list[Asked]]] = {
    "Qwen-Image": (QwenImage(), images(512)),
    "Qwen-Image-Edit": (QwenImage(image_tokens=4096), images(1500)),
    "FLUX.1": (Flux(), images(512)),
    "Stable Diffusion 3.5": (StableDiffusion3(), images(256)),
    "Z-Image": (ZImage(), images(128)),
    "LongCat-Image": (LongCatImage(), images(512)),
    "Wan2.2 TI2V-5B, text": (Wan(48, 16), videos(SMALL, MEDIUM)),
    "Wan2.2 TI2V-5B, image": (Wan(48, 16, "frame"), videos(SMALL, MEDIUM)),
    "Wan2.2 T2V-A14B": (Wan(16, 8), videos(SMALL, LARGE)),
    "Wan2.2 I2V-A14B": (Wan(16, 8, "video"), videos(SMALL, LARGE)),
    "Helios": (Helios(), videos(*HELIOS, text_tokens=226)),
}


def table() -> str:
    lines = [
        "| checkpoint | size | text tokens | `conditioning` | guided | of it image | `latents` | of them solver |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, requests) in PUBLISHED.items():
        for asked in requests:
            made, alone = model.artifacts(asked), model.artifacts(replace(asked, guided=False))
            sizes = [alone["conditioning"], *map(made.get, ("conditioning", IMAGE, "latents", SOLVER))]
            cells = " | ".join(f"{size / 1e6:.2f} MB" if size else "" for size in sizes)
            lines.append(f"| {name} | {asked} | {asked.text_tokens} | {cells} |")
    return "\n".join(lines) + "\n"


def differences(text: str) -> list[str]:
    """Lines of the table that ``text`` lacks, and lines of tables in ``text`` that are none of it."""
    wanted = table().splitlines()
    found = [line for line in text.splitlines() if line.startswith("|")]
    missing = [f"missing: {line}" for line in wanted if line not in found]
    return missing + [f"not computed: {line}" for line in found if line not in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/models/artifacts.md")
    if not parser.parse_args(argv).check:
        print(table(), end="")
        return 0
    found = differences(DOC.read_text())
    print("\n".join(found) or f"{DOC.name} has what is computed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
