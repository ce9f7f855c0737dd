"""How near edits that leave tokens out come to those that compute all, with a server's own weights.

For each folder below EDITS with `image.png`, `mask.png` (white is painted) and `prompt.txt` the server at --url
makes an exact edit and one in each mode, with the same seeds. SSIM is that of the exact edit and the other one,
where the mask is; the CLIP score is 100 times the cosine of image and prompt, as in FlashPS, Table 2. Needs
scikit-image, and transformers for CLIP. What random weights give says nothing. Run as
`python -m benchmarks.edit_quality EDITS`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from gfdit.cli.provenance import provenance, source_lines, write_report

MODES: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact"},
    "own": {"mode": "own"},
    "cached": {"mode": "cached"},
    "cached, last 3 full": {"mode": "cached", "full_last": 3},
}
HEAD = ("| mode | SSIM | least SSIM | CLIP score | edits |", "|---|---|---|---|---|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edits", type=Path, metavar="EDITS")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clip", metavar="MODEL", help="such as openai/clip-vit-large-patch14; none by default")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.edits.glob("*/prompt.txt"))
    if not folders:
        parser.error(f"{args.edits} has no folder with prompt.txt, image.png and mask.png")
    score = (lambda *_: None) if args.clip is None else clip_score(args.clip)
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in MODES}
    for folder in folders:
        prompt, mask = (folder / "prompt.txt").read_text().strip(), Image.open(folder / "mask.png").convert("L")
        fields = {"prompt": prompt, "num_inference_steps": args.steps, "strength": args.strength}
        edit(args.url, folder, fields | {"seed": 0}, MODES["cached"] | {"mode": "record"})
        for seed in args.seeds:
            made = {
                name: edit(args.url, folder, fields | {"seed": seed}, options) for name, options in MODES.items()
            }
            for name, image in made.items():
                found[name].append((ssim(made["exact"], image, mask), score(image, prompt)))
        print(folder.name, *(f"{name}: {each[-1]}" for name, each in found.items()), sep="\n  ", flush=True)
    report = provenance(sys.argv) | {"found": found, "options": MODES}
    rows = [_row(name, each) for name, each in found.items()]
    text = ["# Edits that leave tokens out", "", *source_lines(report), "", *HEAD, *rows, ""]
    write_report(args.out, "edit_quality", report, "\n".join(text))
    print("\n".join([*HEAD, *rows]))


def edit(url: str, folder: Path, fields: dict[str, Any], options: dict[str, Any]) -> Image.Image:
    """Raises ``SystemExit`` with what the server says against it."""
    files = {
        name: (f"{name}.png", (folder / path).read_bytes(), "image/png")
        for name, path in (("image", "image.png"), ("mask_image", "mask.png"))
    }
    form = {name: str(value) for name, value in fields.items()}
    form["extra_params"] = json.dumps({"gfdit": {"edit": options}})
    answer = httpx.post(f"{url}/v1/images/edits", data=form, files=files, timeout=3600.0)
    if answer.status_code != 200:
        raise SystemExit(f"{folder.name}: {answer.text}")
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).convert("RGB")


def ssim(one: Image.Image, other: Image.Image, mask: Image.Image) -> float:
    """Mean structural similarity where ``mask`` is white."""
    from skimage.metrics import structural_similarity  # type: ignore[import-not-found, unused-ignore]

    _, by_pixel = structural_similarity(np.asarray(one), np.asarray(other), channel_axis=2, full=True)
    return float(by_pixel[np.asarray(mask.resize(one.size)) >= 128].mean())


def clip_score(model: str) -> Callable[[Image.Image, str], float]:
    import torch
    from transformers import CLIPModel, CLIPProcessor

    clip, processor = CLIPModel.from_pretrained(model), CLIPProcessor.from_pretrained(model)

    @torch.inference_mode()
    def score(image: Image.Image, prompt: str) -> float:
        given = processor(text=[prompt], images=image, return_tensors="pt", truncation=True)
        found = clip(**given)
        return 100 * float(torch.nn.functional.cosine_similarity(found.image_embeds, found.text_embeds))

    return score


def _row(name: str, found: Sequence[tuple[float, float | None]]) -> str:
    similarities = [similarity for similarity, _ in found]
    scores = [score for _, score in found if score is not None]
    clip = f"{statistics.fmean(scores):.2f}" if scores else "-"
    return f"| {name} | {statistics.fmean(similarities):.4f} | {min(similarities):.4f} | {clip} | {len(found)} |"


if __name__ == "__main__":
    main()
