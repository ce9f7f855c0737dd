"""Names of what is kept: a template's is the digest of all that its keys and values depend on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_DIGEST_BYTES = 32
_HEX = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """A template as one model sees it, for one prompt, noise and schedule. ``str()`` is 64 hexadecimal digits."""

    digest: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.digest):
            raise ValueError(
                f"a template is named by {2 * _DIGEST_BYTES} hexadecimal digits, not by {self.digest!r}"
            )

    def __str__(self) -> str:
        return self.digest

    @classmethod
    def of(
        cls,
        *,
        image: Any,
        model: Any,
        size: Any,
        sigmas: Any,
        prompts: Any,
        guidance: Any,
        noise: Any,
        lora: Any = None,
        quantisation: Any = None,
        **options: Any,
    ) -> TemplateKey:
        """Equal for equal parts, and for no others: what is left out or mistaken here gives wrong images.

        Args:
            image: The template's pixels or latents, as bytes, an array or a tensor.
            model: Its name and its revision or fingerprint.
            size: Width and height of the image, in pixels.
            sigmas: Of every denoising step.
            prompts: All texts that image tokens attend to.
            guidance: Guidance scales.
            noise: The noise, or the seed from which this build makes it.
            lora: Adapters with their scales.
            quantisation: Of the model's weights.
            options: All else that changes keys or values, such as the dtype.

        Parts are ``None``, booleans, numbers, strings, bytes, tensors, sequences and mappings with text keys, as
        deep as need be. Numbers are the same if they are equal, 4 as well as 4.0. Raises ``TypeError`` naming a
        part of another kind.
        """
        required = {
            "image": image, "model": model, "size": size, "sigmas": sigmas, "prompts": prompts,
            "guidance": guidance, "noise": noise, "lora": lora, "quantisation": quantisation,
        }  # fmt: skip
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"gfdit template")
        _feed(digest, {**required, "options": options}, "template")
        return cls(digest.hexdigest())


class UnitKey(NamedTuple):
    """The unit of storage: keys and values that one attention head of all blocks has in one pass.

    A pass is one denoising step and branch of guidance, both counted from 0.
    """

    template: TemplateKey
    step: int
    branch: int
    head: int

    def __str__(self) -> str:
        return f"template {self.template}, step {self.step}, branch {self.branch}, head {self.head}"


def _feed(digest: hashlib.blake2b, part: Any, name: str) -> None:
    """Every part goes in with its kind and length, so that no two different ones look alike."""
    if part is None or isinstance(part, bool):
        _feed_bytes(digest, b"constant", str(part).encode())
    elif isinstance(part, int | float):
        whole = isinstance(part, int) or part.is_integer()
        _feed_bytes(digest, b"number", (str(int(part)) if whole else float(part).hex()).encode())
    elif isinstance(part, str):
        _feed_bytes(digest, b"text", part.encode())
    elif isinstance(part, bytes | bytearray | memoryview):
        _feed_bytes(digest, b"bytes", bytes(part))
    elif isinstance(part, torch.Tensor):
        _feed_bytes(digest, b"tensor", f"{part.dtype} {tuple(part.shape)}".encode())
        values = part.detach().cpu().contiguous()
        _feed_bytes(digest, b"values", values.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(part, Mapping):
        _feed_bytes(digest, b"mapping", str(len(part)).encode())
        for key in sorted(part):
            _feed(digest, key, name)
            _feed(digest, part[key], f"{name}.{key}")
    elif isinstance(part, Sequence):
        _feed_bytes(digest, b"sequence", str(len(part)).encode())
        for index, item in enumerate(part):
            _feed(digest, item, f"{name}[{index}]")
    elif hasattr(part, "__array__"):
        _feed(digest, torch.as_tensor(part), name)
    else:
        raise TypeError(f"{name} is a {type(part).__name__}, of which no digest is defined")


def _feed_bytes(digest: hashlib.blake2b, kind: bytes, content: bytes) -> None:
    digest.update(b"%s %d:" % (kind, len(content)))
    digest.update(content)
