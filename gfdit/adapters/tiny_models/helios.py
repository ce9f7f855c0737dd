"""Helios: text encoder UMT5, the VAE of Wan, a transformer that sees the chunks before at three resolutions."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, HeliosTransformer3DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.t5_encoder import WIDTH as UMT5_WIDTH
from gfdit.adapters.tiny_models.t5_encoder import umt5_encoder

LATENT_CHANNELS = 16
_PAD, _EOS, _UNKNOWN = "<pad>", "</s>", "<unk>"


def write(directory: Path, spec: TinyModelSpec, pipeline: str = "HeliosPipeline", solver: str = "unipc") -> None:
    num_tokens = _write_tokenizer(directory / "tokenizer")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    umt5_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    AutoencoderKLWan(base_dim=4, z_dim=LATENT_CHANNELS, num_res_blocks=1).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(
        json.dumps(_SCHEDULER | {"scheduler_type": solver}, indent=2) + "\n"
    )
    (directory / "model_index.json").write_text(
        json.dumps(_MODEL_INDEX | {"_class_name": pipeline}, indent=2) + "\n"
    )


def write_pyramid(directory: Path, spec: TinyModelSpec) -> None:
    """Like Helios-Distilled: few steps at each resolution, with noise between them."""
    write(directory, spec, pipeline="HeliosPyramidPipeline", solver="dmd")


def _write_tokenizer(directory: Path) -> int:
    """One token for each printable ASCII character. Returns the number of tokens."""
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocab = [(token, 0.0) for token in (_PAD, _EOS, _UNKNOWN)]
    vocab += [(token, -1.0) for token in ("▁", *characters)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS, unk_token=_UNKNOWN, model_max_length=512
    ).save_pretrained(directory)
    return len(vocab)


def _transformer(spec: TinyModelSpec) -> HeliosTransformer3DModel:
    return HeliosTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=spec.num_heads,
        attention_head_dim=spec.head_dim,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=UMT5_WIDTH,
        freq_dim=32,
        ffn_dim=128,
        num_layers=spec.num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_dim=rope_axes(spec.head_dim),
    )


_SCHEDULER = {
    "_class_name": "HeliosScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "stages": 3,
    "stage_range": [0, 1 / 3, 2 / 3, 1],
    "gamma": 0.33,  # 1/3 makes the covariance of the pyramid's noise singular in float32 on a CPU
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_type": "bh2",
    "use_flow_sigmas": True,
    "use_dynamic_shifting": False,
    "time_shift_type": "linear",
}
_MODEL_INDEX = {
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "HeliosScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "HeliosTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
