"""A byte-level Qwen2 tokenizer with no merges: 256 byte tokens and the special tokens a family needs."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode


def write_byte_tokenizer(directory: Path, special_tokens: Sequence[str]) -> int:
    """Write it, special tokens first; the first one pads. Returns the number of tokens."""
    directory.mkdir(parents=True)
    tokens = [*special_tokens, *bytes_to_unicode().values()]
    vocab = {token: index for index, token in enumerate(tokens)}
    added = {
        str(vocab[token]): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in special_tokens
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": special_tokens[-1],
        "pad_token": special_tokens[0],
        "unk_token": None,
        "errors": "replace",
        "model_max_length": 131072,
        "split_special_tokens": False,
    }
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(tokens)
