"""Small random checkpoints of real model families, for tests and the demo.

One module per family, imported when used, with `write(directory, spec)`; families that share their components
share a module and name their function. The real pipeline classes, text encoders, VAEs and schedulers load them:
what is small is their shape.
"""

import importlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

FAMILIES = {
    "anima": "gfdit.adapters.tiny_models.anima",
    "boogu-image": "gfdit.adapters.tiny_models.boogu_image",
    "boogu-image-turbo": "gfdit.adapters.tiny_models.boogu_image:write_turbo",
    "ernie-image": "gfdit.adapters.tiny_models.ernie_image",
    "flux": "gfdit.adapters.tiny_models.flux",
    "flux-controlnet": "gfdit.adapters.tiny_models.controlnets:write_flux",
    "flux-controlnet-pixels": "gfdit.adapters.tiny_models.controlnets:write_flux_pixels",
    "flux-controlnet-union": "gfdit.adapters.tiny_models.controlnets:write_flux_union",
    "flux-kontext": "gfdit.adapters.tiny_models.flux:write_kontext",
    "flux-lora": "gfdit.adapters.tiny_models.loras:write_flux",
    "flux2": "gfdit.adapters.tiny_models.flux2",
    "flux2-klein": "gfdit.adapters.tiny_models.flux2:write_klein",
    "glm-image": "gfdit.adapters.tiny_models.glm_image",
    "helios": "gfdit.adapters.tiny_models.helios",
    "helios-pyramid": "gfdit.adapters.tiny_models.helios:write_pyramid",
    "hidream-image": "gfdit.adapters.tiny_models.hidream_image",
    "hunyuan-video15": "gfdit.adapters.tiny_models.hunyuan_video15",
    "hunyuan-video15-i2v": "gfdit.adapters.tiny_models.hunyuan_video15:write_i2v",
    "krea2": "gfdit.adapters.tiny_models.krea2",
    "krea2-turbo": "gfdit.adapters.tiny_models.krea2:write_distilled",
    "lingbot-video": "gfdit.adapters.tiny_models.lingbot_video",
    "longcat-image": "gfdit.adapters.tiny_models.longcat_image",
    "longcat-image-edit": "gfdit.adapters.tiny_models.longcat_image:write_edit",
    "ltx2": "gfdit.adapters.tiny_models.ltx2",
    "ltx2-distilled": "gfdit.adapters.tiny_models.ltx2:write_distilled",
    "ltx2-dmd2": "gfdit.adapters.tiny_models.ltx2:write_dmd2",
    "lumina2": "gfdit.adapters.tiny_models.lumina2",
    "omnigen2": "gfdit.adapters.tiny_models.omnigen2",
    "ovis-image": "gfdit.adapters.tiny_models.ovis_image",
    "qwen-image": "gfdit.adapters.tiny_models.qwen_image",
    "qwen-image-controlnet": "gfdit.adapters.tiny_models.controlnets:write_qwen_image",
    "qwen-image-edit": "gfdit.adapters.tiny_models.qwen_image_edit",
    "qwen-image-edit-plus": "gfdit.adapters.tiny_models.qwen_image_edit:write_plus",
    "qwen-image-layered": "gfdit.adapters.tiny_models.qwen_image_edit:write_layered",
    "qwen-image-lora": "gfdit.adapters.tiny_models.loras:write_two_streams",
    "sana-video": "gfdit.adapters.tiny_models.sana_video",
    "sana-video-i2v": "gfdit.adapters.tiny_models.sana_video:write_i2v",
    "sd3": "gfdit.adapters.tiny_models.sd3",
    "sd3-controlnet": "gfdit.adapters.tiny_models.controlnets:write_sd3",
    "sd3-lora": "gfdit.adapters.tiny_models.loras:write_two_streams",
    "sd3.5-controlnet": "gfdit.adapters.tiny_models.controlnets:write_sd35",
    "sdxl": "gfdit.adapters.tiny_models.sdxl",
    "stable-audio": "gfdit.adapters.tiny_models.stable_audio",
    "wan-dmd": "gfdit.adapters.tiny_models.wan:write_dmd",
    "wan-vace": "gfdit.adapters.tiny_models.wan:write_vace",
    "wan2.2-i2v": "gfdit.adapters.tiny_models.wan:write_i2v",
    "wan2.2-t2v-a14b": "gfdit.adapters.tiny_models.wan:write_t2v",
    "wan2.2-ti2v": "gfdit.adapters.tiny_models.wan:write_ti2v",
    "z-image": "gfdit.adapters.tiny_models.z_image",
}

#: In which weights are stored.
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSpec:
    """What may vary. The transformer's width is `num_heads * head_dim`; weights are stored as `dtype`."""

    seed: int = 0
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, value in (("layers", self.num_layers), ("heads", self.num_heads)):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(f"--head-dim must be a positive multiple of 16, got {self.head_dim}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be in [0, 2**32), got {self.seed}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def build(family: str, directory: Path, spec: TinyModelSpec) -> None:
    """Write the checkpoint: whole, or not at all. Needs torch, transformers and diffusers, but not vLLM."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; allowed: {', '.join(FAMILIES)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        checkpoint.mkdir()
        module, _, function = FAMILIES[family].partition(":")
        getattr(importlib.import_module(module), function or "write")(checkpoint, spec)
        if spec.dtype != "float32":
            from gfdit.adapters.tiny_models.precision import round_weights

            round_weights(checkpoint, spec.dtype)
        if directory.exists():
            directory.rmdir()
        shutil.move(checkpoint, directory)
