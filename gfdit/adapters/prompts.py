"""What pipelines read from a prompt: a plain string, or a dictionary with text, images and embeddings."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

_EMBEDDINGS = (
    "prompt_embeds",
    "pooled_prompt_embeds",
    "negative_prompt_embeds",
    "negative_pooled_prompt_embeds",
)


def positive_text(prompt: Any) -> str:
    """What to draw."""
    return prompt if isinstance(prompt, str) else prompt.get("prompt") or ""


def negative_text(prompt: Any) -> str | None:
    """What not to draw, None if the client has not said so."""
    return None if isinstance(prompt, str) else prompt.get("negative_prompt")


def given_embeddings(prompt: Any) -> dict[str, torch.Tensor | None]:
    """Embeddings that come with the prompt instead of text, (1, ...) each.

    Raises ``ValueError`` for embeddings of tokens without those of the whole prompt.
    """
    given = DiffusionRequestBatch.collate_prompt_field_map([prompt], dict.fromkeys(_EMBEDDINGS))
    for sign in ("", "negative_"):
        tokens, pooled = f"{sign}prompt_embeds", f"{sign}pooled_prompt_embeds"
        if given[tokens] is not None and given[pooled] is None:
            raise ValueError(f"{tokens} needs {pooled} beside it")
    return given
