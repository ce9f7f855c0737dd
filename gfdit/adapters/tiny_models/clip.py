"""CLIP text encoders with a byte-level tokenizer that has no merges."""

from pathlib import Path

from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH = 32
MAX_TOKENS = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"


def write_clip(
    tokenizer: Path, text_encoder: Path, *, projection: bool = False, projection_width: int = WIDTH
) -> None:
    """Write a tokenizer and an encoder for it; ``projection`` gives the kind that Stable Diffusion 3 takes."""
    symbols = list(bytes_to_unicode().values())
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), _START, _END]
    vocab = {token: index for index, token in enumerate(tokens)}
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=MAX_TOKENS).save_pretrained(tokenizer)
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=projection_width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=vocab[_START],
        eos_token_id=vocab[_END],
        pad_token_id=vocab[_END],
    )
    encoder = CLIPTextModelWithProjection if projection else CLIPTextModel
    encoder(config).save_pretrained(text_encoder)
