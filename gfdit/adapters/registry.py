"""The adapter that drives a pipeline, and what has to be done before one is loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from gfdit.adapters.base import ModelAdapter

#: Modules whose ``register`` lets a process load checkpoints that vLLM-Omni's own pipeline class cannot.
PIPELINES = {
    "OvisImagePipeline": "gfdit.adapters.tiny_models.own_dimensions",
    "StableDiffusionXLPipeline": "gfdit.adapters.tiny_models.own_dimensions",
    "ZImagePipeline": "gfdit.adapters.tiny_models.own_dimensions",
}
GENERIC = "gfdit.adapters.forward.adapter:ForwardAdapter"


def make_adapter(
    od_config: OmniDiffusionConfig, num_ranks: int, path: str | None = None, *, ring: bool = False
) -> ModelAdapter:
    """The adapter at ``path``, or the one for any ``forward``.

    With ``ring`` it offers degrees that do not divide the attention heads, too.

    Raises ``ValueError`` for a path that leads nowhere.
    """
    path = path or GENERIC
    module, _, attribute = path.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"adapter {path!r} cannot be loaded, module:Class is expected: {error}") from error
    made = adapter(od_config, num_ranks)
    made.ring = ring
    return made


def register_pipeline(od_config: OmniDiffusionConfig) -> None:
    """To be called before a pipeline is loaded for gfdit; for most checkpoints there is nothing to do."""
    if (module := PIPELINES.get(od_config.model_class_name)) is not None:
        importlib.import_module(module).register(od_config)
