"""HiDream-I1: two CLIPs, T5 and every layer of Llama read the prompt; the transformer's blocks mix experts.

The pipeline scales every request to 128 x 128 latents. Here a latent is a pixel and a token is 8 x 8 of them.
Llama is a checkpoint of its own, in the folder :data:`LLAMA`, to be named as ``auxiliary_text_encoder``.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImageTransformer2DModel
from transformers import LlamaConfig, LlamaForCausalLM

from gfdit.adapters.tiny_models import TinyModelSpec, clip, t5_encoder
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.precision import round_weights
from gfdit.adapters.tiny_models.rope import rope_axes
from gfdit.adapters.tiny_models.t5_tokenizer import write_t5_tokenizer

LLAMA = "text_encoder_4"
PATCH_SIZE = 8
_LLAMA_WIDTH, _LLAMA_LAYERS = 64, 2


def write(directory: Path, spec: TinyModelSpec) -> None:
    """`--layers` counts the blocks of each kind."""
    # A generator per component: the seed of one does not depend on the size of another.
    for offset, number in enumerate(("", "_2")):
        torch.manual_seed(spec.seed + offset)
        clip.write_clip(directory / f"tokenizer{number}", directory / f"text_encoder{number}", projection=True)
    num_tokens = write_t5_tokenizer(directory / "tokenizer_3")
    torch.manual_seed(spec.seed + 2)
    t5_encoder.t5_encoder(num_tokens).save_pretrained(directory / "text_encoder_3")
    num_tokens = write_t5_tokenizer(directory / LLAMA)
    torch.manual_seed(spec.seed + 3)
    _llama(num_tokens).save_pretrained(directory / LLAMA)
    torch.manual_seed(spec.seed + 4)
    autoencoder_kl(0.3611, 0.1159, num_blocks=1).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 5)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")
    # The transformer computes in this type, whatever it is told, and other parts in that of their files.
    round_weights(directory, "bfloat16")


def _llama(num_tokens: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=_LLAMA_WIDTH,
            intermediate_size=128,
            num_hidden_layers=_LLAMA_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def _transformer(spec: TinyModelSpec) -> HiDreamImageTransformer2DModel:
    return HiDreamImageTransformer2DModel(
        patch_size=PATCH_SIZE,
        in_channels=LATENT_CHANNELS,
        num_layers=spec.num_layers,
        num_single_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        caption_channels=[t5_encoder.WIDTH, _LLAMA_WIDTH],
        text_emb_dim=2 * clip.WIDTH,
        num_routed_experts=3,
        num_activated_experts=2,
        axes_dims_rope=rope_axes(spec.head_dim),
        llama_layers=[block % _LLAMA_LAYERS for block in range(2 * spec.num_layers)],
    )


_MODEL_INDEX = {
    "_class_name": "HiDreamImagePipeline",
    "_diffusers_version": "0.34.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "HiDreamImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
