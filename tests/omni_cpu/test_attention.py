"""Attention on the CPU platform, also where a model goes past the backend that the platform names."""

from __future__ import annotations

import importlib

import pytest
import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.platforms import current_omni_platform

from gfdit.omni.plugin import find_accelerator

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")

NUM_HEADS, HEAD_SIZE = 2, 8
SIZES = {"num_heads": NUM_HEADS, "head_size": HEAD_SIZE, "softmax_scale": HEAD_SIZE**-0.5}


def test_a_layers_fallback_masks_text_as_torch_does() -> None:
    path = current_omni_platform.get_diffusion_attn_backend_cls(None, HEAD_SIZE)
    module, _, name = path.rpartition(".")
    backend = getattr(importlib.import_module(module), name)
    query, key, value = (torch.randn(1, length, NUM_HEADS, HEAD_SIZE) for length in (5, 4, 4))
    mask = torch.tensor([[True, True, True, False]])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    expected = expected.transpose(1, 2)
    # A layer makes its fallback of the base class, whatever the platform named.
    for chosen in (backend, SDPABackend):
        attention = chosen.get_impl_cls()(**SIZES)
        torch.testing.assert_close(
            attention.forward(query, key, value, AttentionMetadata(attn_mask=mask)), expected
        )
    with pytest.raises(NotImplementedError):
        SDPAImpl(**SIZES).forward(query, key, value)
