"""Gemma as a text encoder: Gemma 2 of SANA-Video and Gemma 3 of LTX-2, with a tokenizer of single characters."""

from pathlib import Path
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
)

WIDTH = 64
NUM_LAYERS = 2
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")  # in the order of the ids that configurations assume
_SPACE = "\u2581"
_PRINTABLE = range(33, 127)


def write_gemma_tokenizer(directory: Path, max_tokens: int) -> int:
    """Write it; prompts of more than ``max_tokens`` are cut. Returns the number of tokens."""
    tokens = (*_SPECIAL, _SPACE, *map(chr, _PRINTABLE))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=max_tokens).save_pretrained(directory)
    return len(tokens)


def gemma2(num_tokens: int) -> Gemma2Model:
    return Gemma2Model(Gemma2Config(**_sizes(num_tokens)))


def gemma3(num_tokens: int) -> Gemma3ForConditionalGeneration:
    """The kind that could see; LTX-2 only reads with it."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    sizes = _sizes(num_tokens)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=1)
    )


def _sizes(num_tokens: int) -> dict[str, Any]:
    return {
        "vocab_size": num_tokens,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 4096,
    }
