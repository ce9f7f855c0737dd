"""Qwen3 as a text encoder, with a byte-level tokenizer: of Z-Image, FLUX.2 klein, Ovis-Image and Anima."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from gfdit.adapters.tiny_models.byte_tokenizer import write_byte_tokenizer

WIDTH = 64
NUM_LAYERS = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> int:
    """Write it with its chat template. Returns the number of tokens."""
    num_tokens = write_byte_tokenizer(directory, SPECIAL_TOKENS)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return num_tokens


def text_encoder(num_tokens: int, **fields: Any) -> Qwen3ForCausalLM:
    """``fields`` are further ones of its configuration, for the pipeline to read."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=num_tokens,
            hidden_size=WIDTH,
            intermediate_size=128,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            **fields,
        )
    )
