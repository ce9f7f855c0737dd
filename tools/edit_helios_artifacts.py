"""What the artifacts of Qwen-Image-Edit and Helios weigh, computed from the shapes of their tensors.

    python tools/edit_helios_artifacts.py

prints the tables of docs/models/qwen-image-edit.md and helios.md. Tests compare the same computation with
artifacts of the tiny checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32, BFLOAT16, INT64 = 4, 2, 8


@dataclass(frozen=True, slots=True)
class EditShape:
    """``text_tokens`` of one branch, with those of the image; ``image_tokens`` of all input images together."""

    height: int
    width: int
    text_tokens: int
    image_tokens: int = 64 * 64  # one image: vLLM-Omni scales it to about 1024 x 1024 pixels
    text_width: int = 3584
    pixels_per_token: int = 16
    channels: int = 64
    num_bytes: int = BFLOAT16

    def artifacts(self) -> dict[str, int]:
        """Bytes by artifact, guided: embeddings with their masks, tokens of latents."""
        tokens = self.height // self.pixels_per_token * (self.width // self.pixels_per_token)
        return {
            "conditioning": 2 * self.text_tokens * (self.text_width * self.num_bytes + INT64),
            "image": self.image_tokens * self.channels * self.num_bytes,
            "latents": tokens * self.channels * self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class HeliosShape:
    """In chunk ``chunk``, from 0, of a request without a pyramid; latents are always float32."""

    height: int
    width: int
    chunk: int = 0
    text_tokens: int = 226
    text_width: int = 4096
    num_bytes: int = BFLOAT16
    frames: int = 9
    history: int = 16 + 2 + 1

    @property
    def frame_bytes(self) -> int:
        """Of one latent frame: 16 channels, a latent for 8 x 8 pixels."""
        return 16 * (self.height // 8) * (self.width // 8) * FLOAT32

    def artifacts(self) -> dict[str, int]:
        """Bytes by artifact, guided, from the third step of a chunk on: its solver has its full history."""
        made = self.history + self.chunk * self.frames
        in_view = self.history + 1  # copies of the end of the history, and the first frame
        solver = 3 * self.frames  # two predictions and the last sample
        return {
            "conditioning": 2 * self.text_tokens * self.text_width * self.num_bytes,
            "latents": (self.frames + made + in_view + solver) * self.frame_bytes,
            "of them solver": solver * self.frame_bytes,
        }


def main() -> None:
    print("| size | text tokens | `conditioning` | `image` | `latents` |\n|---|---|---|---|---|")
    for side in (512, 1024, 1536):
        edit = EditShape(side, side, text_tokens=1500)
        cells = " | ".join(f"{size / 1e6:.2f} MB" for size in edit.artifacts().values())
        print(f"| {side}x{side} | {edit.text_tokens} | {cells} |")
    print("\n| size | chunk | `conditioning` | `latents` | of them solver history |\n|---|---|---|---|---|")
    for height, width in ((384, 640), (768, 1280)):
        for chunk in (0, 3):
            video = HeliosShape(height, width, chunk)
            cells = " | ".join(f"{size / 1e6:.1f} MB" for size in video.artifacts().values())
            print(f"| {width}x{height} | {chunk + 1} | {cells} |")


if __name__ == "__main__":
    main()
