"""FP8 linear layers on a CPU, by torch. Installed when the first quantised model is loaded.

vLLM chooses a kernel by the platform. Its own for a CPU are for its CPU builds; on the platform that gfdit brings
there were none, and the operator that quantises weights is compiled for GPUs only. With these, models with FP8
weights run where there is no GPU, on stock workers as well.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import PerTensorTorchFP8ScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum

_QUANTISE = "(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()"
_installed: list[torch.library.Library] = []


class PerTensorOnCpu(PerTensorTorchFP8ScaledMMLinearKernel):
    """``torch._scaled_mm``, of whose CPU half vLLM knows nothing on a platform that is not its own."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None


def install() -> None:
    """Idempotent; to be called before the layers of a quantised model are made."""
    if _installed:
        return
    register_linear_kernel(PerTensorOnCpu, PlatformEnum.OOT, "fp8")
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        library.define(f"static_scaled_fp8_quant{_QUANTISE}")
        library.impl("static_scaled_fp8_quant", _quantise, "CPU")
    _installed.append(library)


def _quantise(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: list[int] | None = None
) -> None:
    """``input`` / ``scale`` into ``result``, values over the largest of its type as that."""
    if scale.numel() != 1:
        raise NotImplementedError("on a CPU, FP8 weights have one scale per tensor")
    largest = torch.finfo(result.dtype).max
    result.copy_((input.float() / scale.float()).clamp(-largest, largest))
