"""The UNet of Stable Diffusion XL at other widths than the published ones.

vLLM-Omni's constructor takes no widths, it has them as numbers in its code. All of them are multiples of the first
level's, or named below: the same code runs here with other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.models.sdxl.sdxl_unet import SDXLUNet2DConditionModel

# Of a level, of two that meet at a skip connection, and of the pooled text.
_PUBLISHED_WIDTHS = (320, 640, 960, 1280, 1920, 2560)


def scaled_unet(
    *,
    od_config: OmniDiffusionConfig,
    block_out_channels: Sequence[int] = (320, 640, 1280),
    transformer_layers_per_block: Sequence[int] = (1, 2, 10),
    attention_head_dim: Sequence[int] = (5, 10, 20),
    cross_attention_dim: int = 2048,
) -> SDXLUNet2DConditionModel:
    """Arguments are fields of ``unet/config.json``; ``attention_head_dim`` there is the number of heads per level.

    Raises ``ValueError`` for levels that do not double in width, or whose heads differ in size.
    """
    width = block_out_channels[0]
    head_sizes = {
        channels // heads for channels, heads in zip(block_out_channels, attention_head_dim, strict=True)
    }
    if list(block_out_channels) != [width, 2 * width, 4 * width] or len(head_sizes) != 1:
        raise ValueError(
            f"unet/config.json: block_out_channels {list(block_out_channels)} must double, and attention_head_dim "
            f"{list(attention_head_dim)} with them"
        )
    replaced: dict[Any, Any] = {published: published * width // 320 for published in _PUBLISHED_WIDTHS}
    replaced |= {64: head_sizes.pop(), 2048: cross_attention_dim, (1, 2, 10): tuple(transformer_layers_per_block)}

    def scaled(constant: Any) -> Any:
        if constant in replaced:
            return replaced[constant]
        return tuple(map(scaled, constant)) if isinstance(constant, tuple) else constant

    stock: Any = SDXLUNet2DConditionModel.__init__
    code = stock.__code__.replace(co_consts=tuple(map(scaled, stock.__code__.co_consts)))
    construct = FunctionType(code, stock.__globals__, stock.__name__, stock.__defaults__, stock.__closure__)
    construct.__kwdefaults__ = stock.__kwdefaults__
    unet = type("SDXLUNet2DConditionModel", (SDXLUNet2DConditionModel,), {"__init__": construct})
    return unet(od_config=od_config)
