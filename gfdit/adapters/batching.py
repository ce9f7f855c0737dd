"""Which steps of one dispatch share a forward pass, and why others do not.

A policy batches by kind, model, shape and guidance. What else must agree is vLLM-Omni's to say: the key by which
its own step scheduler batches. Steps that differ in it run one after the other.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.logger import init_logger
from vllm_omni.diffusion.sched.interface import StepBatchSamplingParamsKey

from gfdit.adapters.base import TaskCall

logger = init_logger(__name__)

# Fields of the key that the sampling parameters do not have under that name.
_ELSEWHERE = frozenset({"condition_key", "lora_int_id", "use_step_execution"})
_FIELDS = tuple(field.name for field in fields(StepBatchSamplingParamsKey) if field.name not in _ELSEWHERE)


def step_batch_key(sampling: Any) -> StepBatchSamplingParamsKey:
    """vLLM-Omni's key of a request's ``OmniDiffusionSamplingParams``: equal ones may share a forward pass."""
    lora = sampling.lora_request
    return StepBatchSamplingParamsKey(
        lora_int_id=None if lora is None else lora.lora_int_id,
        **{name: getattr(sampling, name) for name in _FIELDS},
    )


def split_by_key(calls: list[TaskCall], sampling_params: list[Any]) -> list[list[TaskCall]]:
    """Calls whose sampling parameters have equal keys together; a split is logged with its reason."""
    parts: dict[StepBatchSamplingParamsKey, list[TaskCall]] = {}
    for call, sampling in zip(calls, sampling_params, strict=True):
        parts.setdefault(step_batch_key(sampling), []).append(call)
    first, *others = parts
    for other in others:
        log_split(f"they differ in {_differences(first, other)}")
    return list(parts.values())


def log_split(reason: str) -> None:
    """Say once for each reason that a batch was not run as one."""
    logger.info_once("steps of one dispatch run one after the other: %s", reason)


def _differences(one: StepBatchSamplingParamsKey, other: StepBatchSamplingParamsKey) -> str:
    names = (field.name for field in fields(one))
    return ", ".join(name for name in names if getattr(one, name) != getattr(other, name))
