"""Attention on the CPU. Not beside the platform, vLLM-Omni's backends need that one resolved."""

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """The base class picks a `forward_*` by platform and raises for any it does not know, ours included."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSDPABackend(SDPABackend):
    """Torch's scaled-dot-product attention, on CPU."""

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl


# Every layer has a fallback of the base class, whatever the platform says. Some models call it for masked text.
SDPABackend.get_impl_cls = CpuSDPABackend.get_impl_cls
