"""Z-Image's pipeline for checkpoints of other dimensions than the published ones.

vLLM-Omni's class builds its transformer with the published dimensions, whatever ``transformer/config.json`` says.
A checkpoint that differs, a tiny one, needs the class below, which is registered under the same name. That happens
in processes that are about to load such a checkpoint for gfdit and nowhere else: installing gfdit registers
nothing, and published checkpoints are loaded by vLLM-Omni's own class.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.z_image import pipeline_z_image
from vllm_omni.diffusion.models.z_image.pipeline_z_image import get_post_process_func
from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel
from vllm_omni.diffusion.registry import register_diffusion_model
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

__all__ = ["ZImagePipeline", "get_post_process_func", "register", "transformer_field"]

# What the shapes of weights and of rotary embeddings follow from.
_DIMENSIONS = (
    "all_patch_size",
    "all_f_patch_size",
    "in_channels",
    "dim",
    "n_layers",
    "n_refiner_layers",
    "n_heads",
    "n_kv_heads",
    "cap_feat_dim",
    "axes_dims",
)
_PUBLISHED = {
    name: parameter.default
    for name, parameter in inspect.signature(ZImageTransformer2DModel.__init__).parameters.items()
}


class ZImagePipeline(pipeline_z_image.ZImagePipeline):
    """vLLM-Omni's pipeline, with the transformer that the checkpoint describes."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        fields = get_transformer_config_kwargs(od_config.tf_model_config, ZImageTransformer2DModel)
        # The constructor takes no dimensions: for its duration, what it builds has those of the checkpoint.
        pipeline_z_image.ZImageTransformer2DModel = functools.partial(ZImageTransformer2DModel, **fields)
        try:
            super().__init__(od_config=od_config, prefix=prefix)
        finally:
            pipeline_z_image.ZImageTransformer2DModel = ZImageTransformer2DModel


def register(od_config: OmniDiffusionConfig) -> None:
    """Have this process load ``od_config.model`` with the class above, if it has other dimensions."""
    if not _is_published(od_config):
        register_diffusion_model(
            "ZImagePipeline", __name__, "ZImagePipeline", post_process_func_name="get_post_process_func"
        )


def transformer_field(od_config: OmniDiffusionConfig, name: str) -> Any:
    """A constructor argument of the transformer as it will be built."""
    published = _PUBLISHED[name]
    return published if _is_published(od_config) else od_config.tf_model_config.get(name, published)


def _is_published(od_config: OmniDiffusionConfig) -> bool:
    config = od_config.tf_model_config
    return all(_plain(config.get(name, _PUBLISHED[name])) == _plain(_PUBLISHED[name]) for name in _DIMENSIONS)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
