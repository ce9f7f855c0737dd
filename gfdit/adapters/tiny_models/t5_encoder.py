"""T5 encoders: that of FLUX and Stable Diffusion 3, UMT5 of Wan2.2 and Helios, and ByT5, which reads bytes."""

from pathlib import Path
from typing import Any

from transformers import ByT5Tokenizer, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

WIDTH = 64


def t5_encoder(num_tokens: int) -> T5EncoderModel:
    config = T5Config(**_sizes(num_tokens), is_encoder_decoder=False, tie_word_embeddings=False)
    return T5EncoderModel(config)


def umt5_encoder(num_tokens: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_sizes(num_tokens)))


def write_byt5(tokenizer: Path, text_encoder: Path) -> None:
    """Write a tokenizer, which has no vocabulary to make smaller, and an encoder for it."""
    bytes_tokenizer = ByT5Tokenizer()
    bytes_tokenizer.save_pretrained(tokenizer)
    t5_encoder(len(bytes_tokenizer)).save_pretrained(text_encoder)


def _sizes(num_tokens: int) -> dict[str, Any]:
    return {
        "vocab_size": num_tokens,
        "d_model": WIDTH,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
