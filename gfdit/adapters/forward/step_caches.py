"""Step caches of vLLM-Omni, such as TeaCache: what they keep of a request's earlier steps, and who agrees on it.

A cache skips the blocks of a step whose input is like that of the step before, and adds what they made then. Its
hook on the transformer keeps that for one request; here every request has its own, which is part of its latents'
artifact. What is kept under sequence or CFG parallelism is of one rank's share: a request that goes on in another
layout, or with a rank that has nothing, computes its next step in full. All ranks of the layout ask each other,
because one that skips a step does not take part in the collectives of those that compute it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from vllm_omni.diffusion.distributed.parallel_state import (
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    get_sp_group,
)


class Place(NamedTuple):
    """Whose share it is: degrees of sequence and CFG parallelism, and this rank's number in each."""

    sp: int
    cfg: int
    sp_rank: int
    cfg_rank: int

    @classmethod
    def here(cls) -> Place:
        """Of this rank in the task that runs."""
        return cls(
            get_sequence_parallel_world_size(),
            get_classifier_free_guidance_world_size(),
            get_sequence_parallel_rank(),
            get_classifier_free_guidance_rank(),
        )


class Kept(NamedTuple):
    """By hook: the attributes in which it differs from one that has seen no request."""

    place: Place
    attributes: list[dict[str, Any]]


def caching_hooks(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Those that keep something of a request between steps."""
    registries = [getattr(module, "_hook_registry", None) for module in modules]
    hooks = [hook for registry in registries if registry is not None for hook in registry._hooks.values()]
    return [hook for hook in hooks if hasattr(hook, "state_manager")]


def copy_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Hooks replace the tensors of their states, but change states in place."""
    copied = dict(attributes)
    for name, value in attributes.items():
        if hasattr(value, "get_state"):
            copied[name] = manager = copy.copy(value)
            manager._states = {context: copy.copy(state) for context, state in value._states.items()}
    return copied


def is_everywhere(kept: Kept | None, device: torch.device) -> bool:
    """Whether all ranks of the running task have what belongs to their place in it."""
    place = Place.here()
    flag = torch.tensor([float(kept is not None and kept.place == place)], device=device)
    if place.sp > 1:
        flag = get_sp_group().all_reduce(flag)
    if place.cfg > 1:
        flag = get_cfg_group().all_reduce(flag)
    return bool(flag.item() == place.sp * place.cfg)
