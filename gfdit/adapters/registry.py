"""Which adapter drives which pipeline class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    from gfdit.adapters.base import ModelAdapter

#: By the ``_class_name`` of a checkpoint's ``model_index.json``.
ADAPTERS = {
    "QwenImagePipeline": "gfdit.adapters.qwen_image:QwenImageAdapter",
    "WanDMDPipeline": "gfdit.adapters.wan:WanAdapter",
    "WanImageToVideoPipeline": "gfdit.adapters.wan_i2v:WanImageToVideoAdapter",
    "WanPipeline": "gfdit.adapters.wan:WanAdapter",
}
GENERIC = "gfdit.adapters.step_execution:StepExecutionAdapter"


def make_adapter(od_config: OmniDiffusionConfig, num_ranks: int, path: str | None = None) -> ModelAdapter:
    """The adapter at ``path``, or that of ``od_config.model_class_name``, or the generic one for step execution.

    Raises ``ValueError`` naming the pipeline for one that neither covers, or a path that leads nowhere.
    """
    name = od_config.model_class_name
    path = path or ADAPTERS.get(name) or _generic(name)
    module, _, attribute = path.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"adapter {path!r} cannot be loaded, module:Class is expected: {error}") from error
    return adapter(od_config, num_ranks)


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
