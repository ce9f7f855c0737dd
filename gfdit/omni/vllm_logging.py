"""How vLLM is told to log in this process, for those that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import DEFAULT_LOGGING_CONFIG


def vllm_logging() -> dict[str, Any]:
    """For :func:`gfdit.observe.logs.log_as_vllm`: what vLLM has used itself when it was imported."""
    if envs.VLLM_LOGGING_CONFIG_PATH:
        found: dict[str, Any] = json.loads(Path(envs.VLLM_LOGGING_CONFIG_PATH).read_text(encoding="utf-8"))
        return found
    return DEFAULT_LOGGING_CONFIG if envs.VLLM_CONFIGURE_LOGGING else {}
