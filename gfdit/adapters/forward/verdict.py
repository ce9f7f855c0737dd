"""What is known of a pipeline's ``forward``: by kind of request, whether and how it can be cut.

Requests of one :class:`Signature` take the same way through ``forward``, as far as anybody can tell from outside.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct

from gfdit.adapters.forward.known import given_of, has_negative


class Keep(StrEnum):
    """How much of a forward's past is kept for going on elsewhere.

    ``compact``: encoders' outputs, and of denoising the last scheduler step's result, with the state of the
    scheduler and of random generators after it. All earlier results are tensors without values
    (:mod:`gfdit.adapters.forward.past`): a forward that needs one raises.

    ``full``: every noise prediction; scheduler steps and all that forward does itself are done again. For loops
    that keep something of earlier steps, or that step by themselves.
    """

    COMPACT = "compact"
    FULL = "full"


class Cut(StrEnum):
    """Where a denoising step ends."""

    STEP = "scheduler step"  # after each
    DENOISER = "denoiser"  # before each call but the first: loops that step by themselves


class Mode(NamedTuple):
    """How a forward is cut, and what is kept of what came before."""

    keep: Keep = Keep.COMPACT
    cut: Cut = Cut.STEP


class Signature(NamedTuple):
    """``guidance`` is what the client says about it: ``default`` (nothing), ``off``, ``scale``, ``negative``."""

    image: bool
    guidance: str

    def __str__(self) -> str:
        return f"{'image' if self.image else 'text'}/{self.guidance}"

    @classmethod
    def named(cls, name: str) -> Signature:
        """Inverse of ``str``."""
        what, _, guidance = name.partition("/")
        return cls(what == "image", guidance)


class Verdict(Struct, frozen=True):
    """``mode`` None: requests run whole, for ``reason``. The steps that were made of each number asked for."""

    mode: Mode | None
    reason: str = ""
    splits_guidance: bool = False
    steps: tuple[tuple[int, int], ...] = ()
    default_num_steps: int | None = None
    seconds: float = 0.0

    def num_steps(self, asked: int | None) -> int:
        """Expected of a request for ``asked`` steps, on the line through the two that were tried.

        A wrong number makes no wrong image: steps that are left are part of decoding.
        """
        if len(self.steps) < 2:
            return asked or self.default_num_steps or 50
        (few, made_of_few), (many, made_of_many) = sorted(self.steps)[:: len(self.steps) - 1]
        if asked is None:
            always_as_many = many > few and made_of_many == made_of_few
            return made_of_few if always_as_many else self.default_num_steps or 50
        slope = round((made_of_many - made_of_few) / (many - few)) if many > few else 1
        return max(1, made_of_few + slope * (asked - few))


Verdicts = dict[Signature, Verdict]


def has_mask(request: Any) -> bool:
    """Whether the client says which part of an image to paint."""
    return given_of(request).get("mask_image") is not None


def signature_of(request: Any) -> Signature:
    """Of vLLM-Omni's ``OmniDiffusionRequest``."""
    sampling = request.sampling_params
    if has_negative(request):
        guidance = "negative"
    else:
        # vLLM-Omni fills in what the client has not said, and remembers that.
        said = sampling.guidance_scale if sampling.guidance_scale_provided else None
        scales = [scale for scale in (said, sampling.true_cfg_scale) if scale is not None]
        guidance = "default" if not scales else "scale" if max(scales) > 1 else "off"
    return Signature(any(value is not None for value in given_of(request).values()), guidance)
