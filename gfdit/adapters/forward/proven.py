"""What the self-test has said of vLLM-Omni's own pipelines, so that their servers start without it.

``proven.json`` is written by ``python -m tools.prove_families`` and holds for one version of vLLM-Omni: with
another one, or where anything of the pipeline is not vLLM-Omni's own, requests are tried at start.
"""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gfdit.adapters.forward.verdict import Signature, Verdict, Verdicts

PATH = Path(__file__).with_name("proven.json")


class Proven(Struct, frozen=True):
    """Verdicts by pipeline class, and then by signature."""

    vllm_omni: str
    pipelines: dict[str, dict[str, Verdict]]


def proven_verdicts(od_config: Any) -> Verdicts | None:
    """Of vLLM-Omni's ``OmniDiffusionConfig``; None where its requests have to be tried."""
    changed = (
        od_config.diffusion_load_format not in (None, "default")
        or od_config.custom_pipeline_args is not None
        or od_config.cache_backend not in (None, "none")
    )
    found = None if changed else load().pipelines.get(str(od_config.model_class_name))
    if found is None or load().vllm_omni != version():
        return None
    return {Signature.named(name): verdict for name, verdict in found.items()}


def version() -> str:
    """Of the installed vLLM-Omni."""
    return importlib.metadata.version("vllm-omni")


@functools.cache
def load() -> Proven:
    return msgspec.json.decode(PATH.read_bytes(), type=Proven)
