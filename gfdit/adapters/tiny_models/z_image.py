"""Z-Image: text encoder Qwen3, an image VAE, a single stream of image and caption tokens.

vLLM-Omni's pipeline class does not read the transformer's dimensions: gfdit loads this checkpoint with a class of
its own (`gfdit.adapters.z_image_pipeline`), the stock server cannot load it.
"""

import json
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from gfdit.adapters.tiny_models import TinyModelSpec
from gfdit.adapters.tiny_models.autoencoder_kl import LATENT_CHANNELS, autoencoder_kl
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.rope import rope_axes

TEXT_WIDTH = 64
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Rotary positions of captions, rows and columns of patches: sides of up to 2048 pixels.
AXES_LENGTHS = (1024, 128, 128)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = write_byte_tokenizer(directory / "tokenizer", SPECIAL_TOKENS)
    (directory / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed)
    _text_encoder(num_tokens).save_pretrained(directory / "text_encoder")
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl(0.3611, 0.1159).save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec).save_pretrained(directory / "transformer")
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0).save_pretrained(directory / "scheduler")
    (directory / "model_index.json").write_text(json.dumps(_MODEL_INDEX, indent=2) + "\n")


def _text_encoder(num_tokens: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=num_tokens,
            hidden_size=TEXT_WIDTH,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _transformer(spec: TinyModelSpec) -> ZImageTransformer2DModel:
    transformer = ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=spec.num_heads * spec.head_dim,
        n_layers=spec.num_layers,
        n_refiner_layers=1,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_heads,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=list(rope_axes(spec.head_dim)),
        axes_lens=list(AXES_LENGTHS),
    )
    # The library leaves the tokens that pad empty.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token, std=0.02)
    return transformer


_MODEL_INDEX = {
    "_class_name": "ZImagePipeline",
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "ZImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
