"""Inpainting by a stock ``forward`` that knows of no mask, as diffusers' inpainting pipelines make it.

Of a request with an ``image``, the template, and a ``mask_image``: latents begin as the template with noise, some
of the first steps left out (``strength``), and after each step what is not painted is the template with the noise
of that step. What does this is set on the pipeline as what the request sets, so it goes on and off with the rest
of the request's own (:mod:`gfdit.adapters.forward.overlay`), and a replay does it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageOps

from gfdit.adapters.forward.known import given_of, images_of
from gfdit.adapters.options import EditOptions

#: Of a request that does not say: diffusers' own.
DEFAULT_STRENGTH = 0.6


class Edit(NamedTuple):
    """``mask`` is white where ``template`` is painted anew."""

    template: Image.Image
    mask: Image.Image
    strength: float
    options: EditOptions

    def num_steps(self, asked: int) -> int:
        """That are left of ``asked``, as diffusers counts them."""
        return asked - int(max(asked - asked * self.strength, 0))

    def mask_ratio(self, height: int, width: int) -> float:
        """About what share of an image's tokens is painted, of 16 x 16 pixels each."""
        mask = self.mask.convert("L").resize((max(1, width // 8), max(1, height // 8)), Image.Resampling.NEAREST)
        cells = torch.from_numpy(np.array(mask)).float()[None, None]
        return float((torch.nn.functional.max_pool2d(cells, 2, ceil_mode=True) >= 128).float().mean())


def edit_of(request: Any) -> Edit | None:
    """What vLLM-Omni's ``OmniDiffusionRequest`` asks to be painted or recorded; None for neither.

    Raises ``ValueError`` naming the field for what cannot be painted.
    """
    mask, options = given_of(request).get("mask_image"), edit_options_of(request)
    if mask is None and options.mode != "record":
        return None
    images = images_of(request)
    if len(images) != 1:
        raise ValueError(f"mask_image goes with one image, got {len(images)}")
    for name, image in (("image", images[0]), ("mask_image", mask)):
        if image is not None and not isinstance(image, Image.Image):
            raise ValueError(f"{name} must be an image, got {type(image).__name__}")
    strength = request.sampling_params.strength
    strength = DEFAULT_STRENGTH if strength is None else strength
    if not 0 < strength <= 1:
        raise ValueError(f"strength must be above 0 and at most 1, got {strength:g}")
    if mask is None or options.mode == "record":
        return Edit(images[0].convert("RGB"), Image.new("L", images[0].size), 1.0, options)
    return Edit(images[0].convert("RGB"), painted(mask), strength, options)


def edit_options_of(request: Any) -> EditOptions:
    extra = (request.sampling_params.extra_args or {}).get("gfdit") or {}
    return EditOptions.parse(extra.get("edit"))


def painted(mask: Image.Image) -> Image.Image:
    """White where to paint. With an alpha channel that lets anything through that is what is transparent (OpenAI's
    ``mask``), otherwise what is white (diffusers' ``mask_image``).

    Raises ``ValueError`` for a mask that covers nothing: it was meant the other way round.
    """
    if mask.has_transparency_data:
        alpha = mask.convert("RGBA").getchannel("A")
        if np.asarray(alpha).min() < 128:
            return ImageOps.invert(alpha)
    mask = mask.convert("RGB")
    if np.asarray(mask.convert("L")).max() < 128:
        raise ValueError(
            "mask_image covers nothing: white is painted, or with an alpha channel what is transparent"
        )
    return mask


class Inpainting:
    """One call of ``pipeline.forward``. Its pipeline samples with flow matching and has the VAE's usual names.

    Of the steps only ``only``, which begins with the template as it is then.
    """

    def __init__(self, pipeline: Any, edit: Edit, only: int | None = None) -> None:
        self.edit = edit
        #: Of the image's latents, those under the mask or partly so; int64 (N,).
        self.tokens = torch.empty(0, dtype=torch.int64)
        #: In all.
        self.num_tokens = 0
        #: That are left, after so many that are not made.
        self.num_steps, self.first_step = 0, 0
        self._pipeline = pipeline
        self._only = only
        self._num_done = 0

    @property
    def computes_some(self) -> bool:
        """Whether steps compute the tokens under the mask only."""
        return self.edit.options.mode in ("own", "cached")

    def put_on(self) -> None:
        """What the pipeline calls from now on, until what the request has set is taken off."""
        pipeline = self._pipeline
        if not hasattr(pipeline.scheduler, "scale_noise"):
            raise ValueError(f"{type(pipeline.scheduler).__name__} does not mix noise with images: no inpainting")
        pipeline.prepare_latents = _around(pipeline.prepare_latents, self._prepare_latents)
        pipeline.prepare_timesteps = _around(pipeline.prepare_timesteps, self._prepare_timesteps)
        step = _around(pipeline.scheduler_step_maybe_with_cfg, self._step)
        pipeline.scheduler_step_maybe_with_cfg = step

    def template_pixels(self) -> torch.Tensor:
        """[1, 3, height, width] in [-1, 1]."""
        return self._pixels(*self._size)[0]

    def pasted(self, output: Any) -> Any:
        """``output`` [n, 3, height, width] in [-1, 1], and the template's own pixels where nothing is painted."""
        if not isinstance(output, torch.Tensor) or output.ndim != 4 or output.shape[1] != 3:
            return output  # latents
        height, width = output.shape[-2:]
        template, mask = (made.to(output.device) for made in self._pixels(height, width))
        return torch.where(mask > 0, output.float(), template)

    # In place of the pipeline's own

    def _prepare_latents(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Noise is drawn after the encoder has drawn its own, as in diffusers."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        asked = dict(bound.arguments)
        self._size = asked["height"], asked["width"]
        template, mask = self._pixels(*self._size)
        encoded = self._encoder(template)
        clean = encoded(asked["generator"])
        made = original(*args, **kwargs)
        latents = made[0] if isinstance(made, tuple) else made
        mask = torch.nn.functional.interpolate(mask, size=clean.shape[-2:]).to(latents)
        self._mask = self._packed(mask.expand(asked["batch_size"], 1, -1, -1))
        # Not as the VAE leaves them in memory: what is convolved in another order is rounded otherwise.
        clean = self._packed(clean.to(latents)).expand_as(latents).contiguous()
        self._clean, self._noise = clean, latents.clone()
        is_painted = self._painted_tokens(mask)
        self.tokens, self.num_tokens = is_painted.nonzero().flatten().to(latents.device), len(is_painted)
        if self.edit.options.reads_template:
            generator = _generator_like(asked["generator"], self._pipeline.device)
            generator.manual_seed(self.edit.options.template_seed)
            clean = self._packed(encoded(generator).to(latents)).contiguous()
            bound.arguments |= {"generator": generator, "batch_size": 1}
            noise = original(*bound.args, **bound.kwargs)
            noise = noise[0] if isinstance(noise, tuple) else noise
            self._clean = torch.where(self._mask > 0, self._clean, clean)
            self._noise = torch.where(self._mask > 0, self._noise, noise)
        self._latents = latents
        if isinstance(made, tuple) and getattr(made[1], "shape", None) == self._clean.shape:
            return latents, self._clean  # the model sees the template, too: diffusers encodes it once
        return made

    def _prepare_timesteps(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timesteps, asked = original(*args, **kwargs)
        first, end = asked - self.edit.num_steps(asked), asked
        if self._only is not None:
            first, end = self._only, self._only + 1
        scheduler = self._pipeline.scheduler
        scheduler.timesteps, scheduler.sigmas = scheduler.timesteps[first:end], scheduler.sigmas[first : end + 1]
        self.first_step, self.num_steps = first, end - first
        self._sigmas = scheduler.sigmas.to(self._latents)
        self._latents.copy_(self._template_at(0))  # which forward has already, as its first latents
        return timesteps[first:end], self.num_steps

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        latents = original(*args, **kwargs)
        self._num_done += 1
        return (1 - self._mask) * self._template_at(self._num_done) + self._mask * latents

    # What it needs

    def _template_at(self, step: int) -> torch.Tensor:
        """With the noise that latents have before ``step``; after the last one with none."""
        if step == self.num_steps:
            return self._clean
        sigma = self._sigmas[step : step + 1]
        return sigma * self._noise + (1.0 - sigma) * self._clean

    def _painted_tokens(self, mask: torch.Tensor) -> torch.Tensor:
        """Bool (S,), of cells (1, 1, height, width): a token is four."""
        patch = 2 if self._packs else int(self._pipeline.transformer.patch_size)
        return torch.nn.functional.max_pool2d(mask.float(), patch).flatten() > 0

    def _pixels(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Template [1, 3, height, width] in [-1, 1]; mask [1, 1, height, width], 1 where to paint."""
        of_mask = self._processor.__class__(
            vae_scale_factor=self._multiple, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        template = self._processor.preprocess(self.edit.template, height=height, width=width)
        return template.float(), of_mask.preprocess(self.edit.mask, height=height, width=width)

    @cached_property
    def _processor(self) -> VaeImageProcessor:
        return VaeImageProcessor(vae_scale_factor=self._multiple)

    @property
    def _packs(self) -> bool:
        """Four cells of latents to a token."""
        return hasattr(self._pipeline, "_pack_latents")

    @property
    def _multiple(self) -> int:
        """Pixels."""
        return int(self._pipeline.vae_scale_factor) * (2 if self._packs else 1)

    def _packed(self, latents: torch.Tensor) -> torch.Tensor:
        """As the transformer takes them, of [n, channels or 1, (1,) height, width]."""
        height, width = latents.shape[-2:]
        if not self._packs:
            return latents
        channels = self._pipeline.transformer.in_channels // 4
        latents = latents.reshape(len(latents), -1, height, width).expand(-1, channels, -1, -1)
        return self._pipeline._pack_latents(latents.contiguous(), len(latents), channels, height, width)

    def _encoder(self, pixels: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """Draws the template's latents [1, channels, (1,) height, width] from what the VAE says of them."""
        vae = self._pipeline.vae
        of_video = getattr(vae.config, "latents_mean", None) is not None
        pixels = pixels.to(self._pipeline.device, vae.dtype)
        found = vae.encode(pixels.unsqueeze(2) if of_video else pixels).latent_dist

        def encoded(generator: Any) -> torch.Tensor:
            latents = found.sample(generator[0] if isinstance(generator, list) else generator)
            if not of_video:
                return (latents - vae.config.shift_factor) * vae.config.scaling_factor
            mean, std = (
                torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
                for values in (vae.config.latents_mean, vae.config.latents_std)
            )
            return (latents - mean) * (1.0 / std)

        return encoded


def _generator_like(generator: Any, device: torch.device) -> torch.Generator:
    """Another one that draws on the same device."""
    one = generator[0] if isinstance(generator, list) else generator
    return torch.Generator(device if one is None else one.device)


def _around(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return own(original, *args, **kwargs)

    return call
