"""The T5 encoder of FLUX and Stable Diffusion 3."""

from transformers import T5Config, T5EncoderModel

WIDTH = 64


def t5_encoder(num_tokens: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=num_tokens,
            d_model=WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
