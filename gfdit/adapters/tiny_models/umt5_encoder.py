"""The UMT5 encoder of Wan2.2 and Helios."""

from transformers import UMT5Config, UMT5EncoderModel

WIDTH = 64


def umt5_encoder(num_tokens: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=num_tokens,
            d_model=WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )
