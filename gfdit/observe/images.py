"""Generated images side by side: how far apart, and a sheet of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THUMBNAIL_PX = 128
_MARGIN_PX = 10
_CAPTION_PX = 18
_FONT_PX = 12
_PAIRS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class ImagePair:
    """Two encoded images of one request; None where there is none."""

    caption: str
    left: bytes | None
    right: bytes | None


def largest_difference(left: bytes, right: bytes) -> int:
    """The largest difference of any colour channel of any pixel, 0 to 255; 255 if the sizes differ."""
    import numpy as np

    a, b = (np.asarray(_open(data), dtype=np.int16) for data in (left, right))
    return int(abs(a - b).max()) if a.shape == b.shape else 255


def contact_sheet(pairs: Sequence[ImagePair], path: str | Path, *, title: str = "") -> None:
    """Write a PNG with every pair side by side under its caption."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT_PX)
    cell_px = 2 * THUMBNAIL_PX + 3 * _MARGIN_PX
    row_px = THUMBNAIL_PX + _CAPTION_PX + 2 * _MARGIN_PX
    columns = min(_PAIRS_PER_ROW, max(1, len(pairs)))
    rows = -(-len(pairs) // columns)
    top_px = _CAPTION_PX + _MARGIN_PX if title else 0
    sheet = Image.new("RGB", (columns * cell_px + _MARGIN_PX, top_px + rows * row_px + _MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN_PX, _MARGIN_PX), title, fill="black", font=font)
    for index, pair in enumerate(pairs):
        x = _MARGIN_PX + index % columns * cell_px
        y = top_px + _MARGIN_PX + index // columns * row_px
        draw.text((x, y), pair.caption, fill="black", font=font)
        for side, data in enumerate((pair.left, pair.right)):
            place = (x + side * (THUMBNAIL_PX + 2), y + _CAPTION_PX)
            sheet.paste(_thumbnail(data), place)
    sheet.save(path)


def _thumbnail(data: bytes | None) -> Any:
    from PIL import Image

    size = (THUMBNAIL_PX, THUMBNAIL_PX)
    return _open(data).resize(size) if data is not None else Image.new("RGB", size, "#dddddd")


def _open(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")
