"""FLUX.2 and FLUX.2 klein: two-stream and single-stream blocks with shared modulation, text from inner layers.

The text encoder of FLUX.2 is Mistral 3, whose vision tower it does not use; that of klein is Qwen3.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedModel, Qwen2Tokenizer

from gfdit.adapters.tiny_models import TinyModelSpec, qwen3
from gfdit.adapters.tiny_models.autoencoder_kl import FLUX2_LATENT_CHANNELS, autoencoder_kl_flux2
from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer
from gfdit.adapters.tiny_models.flux import scheduler

# Hidden states of the text encoder, side by side in the embeddings of a token. The published models take three.
TEXT_LAYERS = (1, 2)
TEXT_WIDTH = qwen3.WIDTH * len(TEXT_LAYERS)
_SPECIAL_TOKENS = ("<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "</s>")
_CHAT = "{% for m in messages %}[INST]{% for c in m.content %}{{ c.text }}{% endfor %}[/INST]{% endfor %}"


def write(directory: Path, spec: TinyModelSpec) -> None:
    """`--layers` counts the blocks of each kind."""
    num_tokens = write_mistral_tokenizer(directory / "tokenizer")
    torch.manual_seed(spec.seed)
    _write(directory, spec, mistral(num_tokens, text_encoder_out_layers=list(TEXT_LAYERS)), guidance=True)


def write_klein(directory: Path, spec: TinyModelSpec) -> None:
    num_tokens = qwen3.write_tokenizer(directory / "tokenizer")
    torch.manual_seed(spec.seed)
    encoder = qwen3.text_encoder(num_tokens, text_encoder_out_layers=list(TEXT_LAYERS))
    _write(directory, spec, encoder, guidance=False)


def _write(directory: Path, spec: TinyModelSpec, text_encoder: PreTrainedModel, *, guidance: bool) -> None:
    text_encoder.save_pretrained(directory / "text_encoder")
    # A generator per component: the seed of one does not depend on the size of another.
    torch.manual_seed(spec.seed + 1)
    autoencoder_kl_flux2().save_pretrained(directory / "vae")
    torch.manual_seed(spec.seed + 2)
    _transformer(spec, guidance).save_pretrained(directory / "transformer")
    scheduler().save_pretrained(directory / "scheduler")
    index = _COMPONENTS | (_FLUX2 if guidance else _KLEIN)
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_mistral_tokenizer(directory: Path) -> int:
    """Write it as a processor, which takes pictures too. Returns the number of tokens."""
    num_tokens = write_byte_tokenizer(directory, _SPECIAL_TOKENS)
    # Tokenizers of Mistral's are only looked for in one file, tokenizer.json.
    Qwen2Tokenizer.from_pretrained(directory).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_IMAGES, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(_CHAT)
    return num_tokens


def mistral(num_tokens: int, **fields: Any) -> Mistral3ForConditionalGeneration:
    """``fields`` are further ones of the configuration of its text part, for the pipeline to read."""
    text = {
        "model_type": "mistral",
        "vocab_size": num_tokens,
        "hidden_size": qwen3.WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": qwen3.NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = Mistral3Config(
        text_config=text | fields, vision_config=vision, image_token_index=1, tie_word_embeddings=False
    )
    return Mistral3ForConditionalGeneration(config)


def _transformer(spec: TinyModelSpec, guidance: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=4 * FLUX2_LATENT_CHANNELS,
        num_layers=spec.num_layers,
        num_single_layers=spec.num_layers,
        attention_head_dim=spec.head_dim,
        num_attention_heads=spec.num_heads,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(spec.head_dim // 4,) * 4,
        guidance_embeds=guidance,
    )


_IMAGES = {"image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"}
_COMPONENTS = {
    "_diffusers_version": "0.36.0.dev0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
_FLUX2 = {
    "_class_name": "Flux2Pipeline",
    "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
    "tokenizer": ["transformers", "PixtralProcessor"],
}
_KLEIN = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": False,
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
}
