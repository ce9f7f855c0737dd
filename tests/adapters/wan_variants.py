"""Checkpoints that no family of `gfdit tiny-model` is, made from one that is. Run where torchvision is stubbed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

IMAGE_WIDTH = 32


def fastwan(source: Path, target: Path) -> None:
    """The 5B model as FastWan: vLLM-Omni knows it by its name alone."""
    shutil.copytree(source, target)
    _change_json(target / "model_index.json", _class_name="WanDMDPipeline")


def with_image_encoder(source: Path, target: Path) -> None:
    """The image-to-video model with an encoder of images, whose tokens join those of the text, as Wan2.1 has."""
    import torch
    from diffusers import WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    shutil.copytree(source, target)
    torch.manual_seed(17)
    config = CLIPVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    CLIPVisionModel(config).save_pretrained(target / "image_encoder")
    side = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(target / "image_processor")
    for folder in ("transformer", "transformer_2"):
        plain = WanTransformer3DModel.load_config(target / folder)
        width = plain["num_attention_heads"] * plain["attention_head_dim"]
        shutil.rmtree(target / folder)
        expert = WanTransformer3DModel.from_config({**plain, "image_dim": IMAGE_WIDTH, "added_kv_proj_dim": width})
        expert.save_pretrained(target / folder)
    _change_json(
        target / "model_index.json",
        image_encoder=["transformers", "CLIPVisionModel"],
        image_processor=["transformers", "CLIPImageProcessor"],
    )


def _change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
