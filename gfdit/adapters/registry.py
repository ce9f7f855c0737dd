"""Which adapter drives which pipeline class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from gfdit.adapters.base import ModelAdapter

#: By the ``_class_name`` of a checkpoint's ``model_index.json``.
ADAPTERS = {
    "FluxPipeline": "gfdit.adapters.flux:FluxAdapter",
    "HeliosPipeline": "gfdit.adapters.helios:HeliosAdapter",
    "HeliosPyramidPipeline": "gfdit.adapters.helios:HeliosAdapter",
    "LongCatImagePipeline": "gfdit.adapters.longcat_image:LongCatImageAdapter",
    "QwenImageEditPipeline": "gfdit.adapters.qwen_image_edit:QwenImageEditAdapter",
    "QwenImageEditPlusPipeline": "gfdit.adapters.qwen_image_edit:QwenImageEditPlusAdapter",
    "QwenImagePipeline": "gfdit.adapters.qwen_image:QwenImageAdapter",
    "StableDiffusion3Pipeline": "gfdit.adapters.sd3:StableDiffusion3Adapter",
    "WanDMDPipeline": "gfdit.adapters.wan:WanAdapter",
    "WanImageToVideoPipeline": "gfdit.adapters.wan_i2v:WanImageToVideoAdapter",
    "WanPipeline": "gfdit.adapters.wan:WanAdapter",
    "ZImagePipeline": "gfdit.adapters.z_image:ZImageAdapter",
}
#: Modules whose ``register`` lets a process load checkpoints that vLLM-Omni's own pipeline class cannot.
PIPELINES = {
    "OvisImagePipeline": "gfdit.adapters.own_dimensions",
    "StableDiffusionXLPipeline": "gfdit.adapters.own_dimensions",
    "ZImagePipeline": "gfdit.adapters.own_dimensions",
}
GENERIC = "gfdit.adapters.step_execution:StepExecutionAdapter"
_ONE_RANK = "its step execution refuses sequence and CFG parallelism: there is nothing to choose for a step"
_AUDIO = "it makes audio, and its steps change their input in place, so that none could run again after a fault"
_MODULE = "the state of its requests contains the transformer itself, which cannot follow them to another rank"
#: Pipelines that implement step execution and still are not served, with the reason.
REFUSED = {
    "BagelPipeline": _ONE_RANK,
    "HunyuanImage3ForCausalMM": _ONE_RANK,
    "LingBotWorldCausalDMDPipeline": "it keeps the attention cache of every request on the pipeline of one rank",
    "MiniMaxH3ModularPipeline": _MODULE,
    "MiniMaxH3Pipeline": _MODULE,
    "OmniVoice": _AUDIO,
    "OmniVoicePipeline": _AUDIO,
    "QwenImageDMD2Pipeline": "step execution leaves out what it does to every request: its own steps, no guidance",
}


def make_adapter(
    od_config: OmniDiffusionConfig, num_ranks: int, path: str | None = None, *, ring: bool = False
) -> ModelAdapter:
    """The adapter at ``path``, or that of ``od_config.model_class_name``, or the generic one for step execution.

    With ``ring`` it offers degrees that do not divide the attention heads, too.

    Raises ``ValueError`` naming the pipeline for one that neither covers, or a path that leads nowhere.
    """
    name = od_config.model_class_name
    if path is None and name in REFUSED:
        raise ValueError(f"gfdit does not serve {name}: {REFUSED[name]}")
    path = path or ADAPTERS.get(name) or _generic(name)
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


def _generic(name: str) -> str:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    pipeline = DiffusionModelRegistry._try_load_model_cls(name)
    if not getattr(pipeline, "supports_step_execution", False):
        known = ", ".join(sorted(ADAPTERS))
        raise ValueError(
            f"gfdit has no adapter for {name!r} and the pipeline does not implement step execution; "
            f"adapters: {known}"
        )
    return GENERIC
