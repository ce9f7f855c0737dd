"""Requests of a trace as HTTP requests: images, edited images and videos, each to the endpoint that makes it.

A request's prompt and seed follow from its id alone, so two servers given one trace are asked for the same
images.
"""

from __future__ import annotations

import base64
import io
import json
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    import httpx

IMAGES_PATH = "/v1/images/generations"
EDITS_PATH = "/v1/images/edits"
CHAT_PATH = "/v1/chat/completions"  # the endpoint for edits of other servers takes no parameters but its own
VIDEOS_PATH = "/v1/videos/sync"
GUIDANCE_SCALE = 4.0
FRAMES_PER_S = 16
TOKEN_SIDE = 16  # pixels
WHOLE_SCHEDULE = 1.0  # of edits under a mask: as many steps as are asked for
NO_GUIDANCE = 0.0  # some families are guided unless they are told not to be
_SUBJECTS = ("a red panda", "a lighthouse", "an old tram", "a bowl of cherries", "two foxes", "a glass city")
_STYLES = ("in the rain", "as a watercolour", "at dawn", "in thick fog", "by candlelight", "from above")


@dataclass(frozen=True, slots=True)
class Generation:
    """``arguments`` of ``httpx``'s ``post`` to ``path``; ``read`` takes the PNG or MP4 out of the answer.

    ``read`` raises ``ValueError``, ``KeyError``, ``IndexError`` or ``TypeError`` for an answer of another form.
    """

    path: str
    arguments: Mapping[str, Any]
    read: Callable[[httpx.Response], bytes]


def prompt_of(request_id: str) -> str:
    pick = zlib.crc32(request_id.encode())
    return f"{_SUBJECTS[pick % len(_SUBJECTS)]} {_STYLES[pick // len(_SUBJECTS) % len(_STYLES)]}"


def seed_of(request_id: str) -> int:
    return zlib.crc32(request_id.encode()) & 0x7FFFFFFF


def generation(
    request: TraceRequest,
    *,
    send_slo: bool,
    input_image: bytes | None = None,
    mask_image: bytes | None = None,
    extra_params: Mapping[str, Any] = MappingProxyType({}),
) -> Generation:
    """How to ask for ``request``; ``input_image`` is a PNG to edit, or to begin the video with.

    ``mask_image`` is one that is white where to edit. ``send_slo`` tells the server deadline, class and priority,
    which only gfdit understands. ``extra_params`` are what only the model understands, and other options of gfdit.
    An edit without images is of one that follows from its template's name, as its prompt does, with the upper rows
    of tokens under the mask.
    """
    extra = dict(extra_params)
    if send_slo:
        extra["gfdit"] = {**extra.get("gfdit", {}), **_slo(request)}
    if request.num_frames > 1:
        form = _video_form(request) | ({"extra_params": json.dumps(extra)} if extra else {})
        files = {"input_reference": ("input.png", input_image, "image/png")} if input_image else None
        return Generation(VIDEOS_PATH, {"data": form, "files": files}, _read_video)
    if request.mask_ratio is not None:
        input_image, mask_image = input_image or _template(request), mask_image or _mask(request)
    if input_image is not None and mask_image is not None:
        form = {"prompt": prompt_of(request.template or request.id), **_common(request)}
        form["strength"] = request.strength or WHOLE_SCHEDULE
        form |= {"extra_params": json.dumps(extra)} if extra else {}
        images = {"image": input_image, "mask_image": mask_image}
        files = {name: (f"{name}.png", image, "image/png") for name, image in images.items()}
        return Generation(EDITS_PATH, {"data": form, "files": files}, _read_image)
    if input_image is not None:
        return Generation(CHAT_PATH, {"json": _chat_body(request, input_image, extra)}, _read_chat_image)
    body = _image_body(request) | ({"extra_params": extra} if extra else {})
    return Generation(IMAGES_PATH, {"json": body}, _read_image)


def _slo(request: TraceRequest) -> dict[str, Any]:
    slo: dict[str, Any] = {"slo_class": request.slo_class, "priority": request.priority}
    if request.deadline_s is not None:
        slo["deadline_ms"] = request.deadline_s * 1e3
    return slo


def _common(request: TraceRequest) -> dict[str, Any]:
    """What every endpoint takes. Families differ in which of the two scales is that of their guidance."""
    body: dict[str, Any] = {
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.num_steps,
        "seed": seed_of(request.id),
    }
    if not request.cfg:
        return body | {"guidance_scale": NO_GUIDANCE}
    return body | {"negative_prompt": "blurry", "true_cfg_scale": GUIDANCE_SCALE, "guidance_scale": GUIDANCE_SCALE}


def _image_body(request: TraceRequest) -> dict[str, Any]:
    return {"prompt": prompt_of(request.id), **_common(request), "response_format": "b64_json"}


def _video_form(request: TraceRequest) -> dict[str, Any]:
    form = {"prompt": prompt_of(request.id), "num_frames": request.num_frames, "fps": FRAMES_PER_S}
    return form | _common(request)


def _chat_body(request: TraceRequest, input_image: bytes, extra: dict[str, Any]) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(input_image).decode()}"
    content = [
        {"type": "text", "text": prompt_of(request.id)},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    extra_body = _common(request) | {"extra_args": extra}
    return {"messages": [{"role": "user", "content": content}], "extra_body": extra_body}


def _template(request: TraceRequest) -> bytes:
    from PIL import Image

    draw = random.Random(request.template)
    corners = Image.frombytes("RGB", (2, 2), draw.randbytes(12))
    return _png(corners.resize((request.width, request.height), Image.Resampling.BICUBIC))


def _mask(request: TraceRequest) -> bytes:
    return mask_of(request.width, request.height, request.mask_ratio or 1.0)[0]


def mask_of(width: int, height: int, mask_ratio: float) -> tuple[bytes, float]:
    """A PNG that is white in about such a share of its rows of tokens, at least one, and the share."""
    from PIL import Image

    painted = min(height, TOKEN_SIDE * max(1, round(mask_ratio * height / TOKEN_SIDE)))
    mask = Image.new("L", (width, height))
    mask.paste(255, (0, 0, width, painted))
    return _png(mask), painted / height


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _read_image(response: httpx.Response) -> bytes:
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def _read_chat_image(response: httpx.Response) -> bytes:
    url = response.json()["choices"][0]["message"]["content"][0]["image_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


def _read_video(response: httpx.Response) -> bytes:
    if (kind := response.headers.get("content-type")) != "video/mp4":
        raise ValueError(f"content type {kind}")
    return response.content
