"""Requests of a trace as HTTP requests: images, edited images and videos, each to the endpoint that makes it.

A request's prompt and seed follow from its id alone, and the image it edits from its template's name, so two
servers given one trace are asked for the same images.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gfdit.sim.trace import TraceRequest

if TYPE_CHECKING:
    import httpx

IMAGES_PATH = "/v1/images/generations"
EDITS_PATH = "/v1/images/edits"
CHAT_PATH = "/v1/chat/completions"  # the endpoint for edits of other servers takes no parameters but its own
VIDEOS_PATH = "/v1/videos/sync"
VIDEO_JOBS_PATH = "/v1/videos"  # where OpenAI's own client makes videos: created, asked for, fetched
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
    Where ``is_job``, the answer to the post has an ``id``: ``path/id`` tells its ``status``, and once that is
    ``completed``, ``path/id/content`` is what ``read`` reads.
    """

    path: str
    arguments: Mapping[str, Any]
    read: Callable[[httpx.Response], bytes]
    is_job: bool = False


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
    model: str | None = None,
    endpoint: str | None = None,
    extra_body: Mapping[str, Any] = MappingProxyType({}),
) -> Generation:
    """How to ask for ``request``; ``input_image`` is a PNG to edit, or to begin the video with.

    ``mask_image`` is one that is white where to edit. ``send_slo`` tells the server deadline, class and priority,
    which only gfdit understands. ``extra_params`` are what only the model understands, and other options of gfdit.
    A request that names a template edits the image that follows from that name, as its prompt does, or begins its
    video with it; one with a mask ratio has the upper rows of tokens under the mask.

    ``model`` is the name that the server knows. ``endpoint`` is another path than the request's own, the end of
    which says what form it takes. ``extra_body`` replaces fields of the body, and takes away those that are None.
    Raises ``ValueError`` for an ``endpoint`` that ends in no known form.
    """
    extra = dict(extra_params)
    if send_slo:
        extra["gfdit"] = {**extra.get("gfdit", {}), **_slo(request)}
    path = endpoint or _path_of(request, input_image, mask_image)
    form_of = next((form for end, form in _FORMS.items() if path.endswith(end)), None)
    if form_of is None:
        raise ValueError(f"--endpoint must end in one of {', '.join(_FORMS)}, got {path}")
    form = form_of(request, _pictures(request, input_image, mask_image), extra)
    body = {"model": model, **form.body, **extra_body}
    return form.to(path, {name: value for name, value in body.items() if value is not None})


def _path_of(request: TraceRequest, input_image: bytes | None, mask_image: bytes | None) -> str:
    if request.num_frames > 1:
        return VIDEOS_PATH
    if request.mask_ratio is not None or request.template is not None or (input_image and mask_image):
        return EDITS_PATH
    return IMAGES_PATH if input_image is None else CHAT_PATH


@dataclass(frozen=True, slots=True)
class _Pictures:
    """PNGs: what is edited, or begins a video, and which part of it; None where there is none."""

    image: bytes | None
    mask: bytes | None


def _pictures(request: TraceRequest, input_image: bytes | None, mask_image: bytes | None) -> _Pictures:
    width, height = request.width, request.height
    if input_image is None and (request.template is not None or request.mask_ratio is not None):
        input_image = _template(request.template or request.id, width, height)
    if mask_image is None and request.mask_ratio is not None:
        mask_image = mask_of(width, height, request.mask_ratio)[0]
    return _Pictures(input_image, mask_image)


@dataclass(frozen=True, slots=True)
class _Form:
    """The fields of a body, as JSON or, with ``files``, as a form."""

    body: dict[str, Any]
    read: Callable[[httpx.Response], bytes]
    files: dict[str, bytes] | None = None
    is_job: bool = False

    def to(self, path: str, body: dict[str, Any]) -> Generation:
        if self.files is None:
            return Generation(path, {"json": body}, self.read)
        fields = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in body.items()}
        files = {name: (f"{name}.png", image, "image/png") for name, image in self.files.items()}
        return Generation(path, {"data": fields, "files": files or None}, self.read, self.is_job)


def _image(request: TraceRequest, pictures: _Pictures, extra: dict[str, Any]) -> _Form:
    body = {"prompt": prompt_of(request.id), **_common(request), "response_format": "b64_json"}
    return _Form(body | ({"extra_params": extra} if extra else {}), _read_image)


def _edit(request: TraceRequest, pictures: _Pictures, extra: dict[str, Any]) -> _Form:
    image = pictures.image or _template(request.template or request.id, request.width, request.height)
    body = {"prompt": prompt_of(request.template or request.id), **_common(request)}
    files = {"image": image}
    if pictures.mask is not None:
        files["mask_image"] = pictures.mask
    if strength := request.strength or (None if pictures.mask is None else WHOLE_SCHEDULE):
        body["strength"] = strength
    return _Form(body | ({"extra_params": extra} if extra else {}), _read_image, files)


def _video(request: TraceRequest, pictures: _Pictures, extra: dict[str, Any]) -> _Form:
    body = {"prompt": prompt_of(request.id), "num_frames": request.num_frames, "fps": FRAMES_PER_S}
    body |= _common(request) | ({"extra_params": extra} if extra else {})
    return _Form(body, _read_video, {"input_reference": pictures.image} if pictures.image else {})


def _video_job(request: TraceRequest, pictures: _Pictures, extra: dict[str, Any]) -> _Form:
    return replace(_video(request, pictures, extra), is_job=True)


def _chat(request: TraceRequest, pictures: _Pictures, extra: dict[str, Any]) -> _Form:
    content: list[dict[str, Any]] = [{"type": "text", "text": prompt_of(request.id)}]
    if pictures.image is not None:
        url = f"data:image/png;base64,{base64.b64encode(pictures.image).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    extra_body = _common(request) | {"extra_args": extra}
    body = {"messages": [{"role": "user", "content": content}], "extra_body": extra_body}
    return _Form(body, _read_chat_image)


_FORMS: Mapping[str, Callable[[TraceRequest, _Pictures, dict[str, Any]], _Form]] = MappingProxyType(
    {
        "/images/generations": _image,
        "/images/edits": _edit,
        "/videos/sync": _video,
        "/videos": _video_job,
        "/chat/completions": _chat,
    }
)


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


@functools.lru_cache(maxsize=256)
def _template(name: str, width: int, height: int) -> bytes:
    from PIL import Image

    draw = random.Random(name)
    corners = Image.frombytes("RGB", (2, 2), draw.randbytes(12))
    return _png(corners.resize((width, height), Image.Resampling.BICUBIC))


@functools.lru_cache(maxsize=256)
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
