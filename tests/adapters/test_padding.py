"""At lengths that no degree divides attention gets no mask, in any family, and images are those of stock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest, check_adapter
from tests.adapters.test_bfloat16 import PICTURE, SPLIT_BY_GFDIT_ALONE, UNREWRITTEN, image, video
from tests.support.waiting import HANG_S

#: With odd numbers of image tokens: 5 x 7, 9 x 13, or 3 x 3 of each frame.
ODD: dict[str, KitRequest] = {
    **SPLIT_BY_GFDIT_ALONE,
    "helios": video(48, 48, 33, sampling={}),
    "longcat-image": image(80, 112, sampling=UNREWRITTEN),
    "qwen-image": image(80, 112),
    "qwen-image-edit": image(80, 112, images=(PICTURE,)),
    "qwen-image-edit-plus": image(80, 112, images=(PICTURE, PICTURE.rotate(180))),
}


def refuse_masks(executor: Any) -> int:
    """Have every layer that is split raise if it is given a mask, as with backends that take none."""
    from vllm_omni.diffusion.attention.layer import Attention

    layers = [module for module in executor.runner.pipeline.modules() if isinstance(module, Attention)]
    split = [layer for layer in layers if not layer.skip_sequence_parallel]
    for layer in split:
        refusing = {"supports_attention_mask": classmethod(lambda cls, attention_spec=None: False)}
        layer.attn_backend = type("WithoutMasks", (layer.attn_backend,), refusing)
    executor.runner.takes_masks = False
    return len(split)


def mask_everything(executor: Any) -> None:
    """Sabotage: give a mask that leaves nothing out."""
    import torch
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    from gfdit.omni.ulysses import GroupFreeUlysses

    def masked(self: Any, *args: Any) -> Any:
        q, k, v, _, context = original(self, *args)
        mask = torch.ones(k.shape[:2], dtype=torch.bool)
        return q, k, v, AttentionMetadata(attn_mask=mask), context

    original = GroupFreeUlysses.pre_attention
    setattr(GroupFreeUlysses, "pre_attention", masked)  # noqa: B010


@pytest.mark.thorough
@pytest.mark.parametrize("family", ODD)
def test_no_family_masks_its_padding(
    family: str, fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    with AdapterKit(tiny_model(family), fork_server=fork_server, comm_timeout_s=HANG_S) as kit:
        assert all(count > 0 for count in kit.on_ranks(refuse_masks)), "there is attention that is split"
        report = check_adapter(kit, [ODD[family]], checks=["sp1", "layouts"], num_scripts=1)
        assert report.passed, str(report)


@pytest.mark.thorough
def test_a_mask_would_be_seen(fork_server: ForkServer, tiny_model: Callable[..., Path]) -> None:
    """Negative control."""
    with AdapterKit(tiny_model("qwen-image"), fork_server=fork_server, comm_timeout_s=HANG_S) as kit:
        kit.on_ranks(refuse_masks)
        kit.on_ranks(mask_everything)
        with pytest.raises(Exception, match="does not support attn_mask"):
            kit.run(ODD["qwen-image"], "sp2@1,0")
