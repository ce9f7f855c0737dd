"""Pipelines whose vLLM-Omni class builds its transformer with the published dimensions, whatever a checkpoint has.

A checkpoint that differs, a tiny one, needs a class that reads them, which is registered under the same name. That
happens only in processes that are about to load such a checkpoint for gfdit: installing gfdit registers nothing,
and published checkpoints are loaded by vLLM-Omni's own class.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_omni.diffusion import registry
from vllm_omni.diffusion.data import OmniDiffusionConfig


@dataclass(frozen=True)
class _Transformer:
    """What a pipeline builds: the class ``name`` of its module, or ``builder`` (``module:function``) in its place.

    Shapes of weights and of rotary embeddings follow from ``dimensions``, arguments of it whose defaults are the
    published ones.
    """

    name: str
    dimensions: tuple[str, ...]
    builder: str | None = None


_TRANSFORMERS = {
    "OvisImagePipeline": _Transformer(
        "OvisImageTransformer2DModel",
        (
            "patch_size",
            "in_channels",
            "num_single_layers",
            "attention_head_dim",
            "num_attention_heads",
            "joint_attention_dim",
            "axes_dims_rope",
        ),
    ),
    "StableDiffusionXLPipeline": _Transformer(
        "SDXLUNet2DConditionModel",
        ("block_out_channels", "transformer_layers_per_block", "attention_head_dim", "cross_attention_dim"),
        "gfdit.adapters.tiny_models.sdxl_unet:scaled_unet",
    ),
    "ZImagePipeline": _Transformer(
        "ZImageTransformer2DModel",
        (
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
        ),
    ),
}
# Where they are in vLLM-Omni, before anything is registered in their place.
_MODULES = {
    name: "vllm_omni.diffusion.models.{}.{}".format(*registry._DIFFUSION_MODELS[name]) for name in _TRANSFORMERS
}
_POST_PROCESS = {name: registry._DIFFUSION_POST_PROCESS_FUNCS[name] for name in _TRANSFORMERS}


def register(od_config: OmniDiffusionConfig) -> None:
    """Have this process load ``od_config.model`` with a class that reads its dimensions, if it has other ones."""
    name = od_config.model_class_name
    if not _is_published(od_config):
        registry.register_diffusion_model(name, __name__, name, post_process_func_name=f"post_process_of_{name}")


def transformer_field(od_config: OmniDiffusionConfig, name: str) -> Any:
    """A constructor argument of the transformer as it will be built."""
    published = _defaults(_builder(od_config.model_class_name))[name]
    return published if _is_published(od_config) else od_config.tf_model_config.get(name, published)


@functools.cache
def __getattr__(name: str) -> Any:
    """The class of a pipeline, and what makes its pictures, by the names that :func:`register` gives."""
    pipeline = name.removeprefix("post_process_of_")
    if pipeline not in _TRANSFORMERS:
        raise AttributeError(name)
    stock = _stock_module(pipeline)
    return _reading_dimensions(stock, pipeline) if name == pipeline else getattr(stock, _POST_PROCESS[pipeline])


def _reading_dimensions(module: ModuleType, pipeline: str) -> type:
    stock = getattr(module, pipeline)
    builder = _builder(pipeline)

    def construct(self: Any, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        config = od_config.tf_model_config.to_dict()
        fields = {name: value for name, value in config.items() if name in _defaults(builder)}
        # The constructor takes no dimensions: for its duration, what it builds has those of the checkpoint.
        name = _TRANSFORMERS[pipeline].name
        transformer = getattr(module, name)
        setattr(module, name, functools.partial(builder, **fields))
        try:
            stock.__init__(self, od_config=od_config, prefix=prefix)
        finally:
            setattr(module, name, transformer)

    return type(pipeline, (stock,), {"__init__": construct, "__module__": __name__})


def _stock_module(pipeline: str) -> ModuleType:
    return importlib.import_module(_MODULES[pipeline])


@functools.cache
def _builder(pipeline: str) -> Callable[..., Any]:
    transformer = _TRANSFORMERS[pipeline]
    if transformer.builder is None:
        return getattr(_stock_module(pipeline), transformer.name)
    module, _, function = transformer.builder.partition(":")
    return getattr(importlib.import_module(module), function)


def _defaults(builder: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()}


def _is_published(od_config: OmniDiffusionConfig) -> bool:
    config = od_config.tf_model_config
    published = _defaults(_builder(od_config.model_class_name))
    names = _TRANSFORMERS[od_config.model_class_name].dimensions
    return all(_plain(config.get(name, published[name])) == _plain(published[name]) for name in names)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
