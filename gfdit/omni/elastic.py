"""What makes loaded modules elastic: stand-in groups, hooks that split tokens, and the group-free strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.distributed.sp_plan import get_sp_plan_from_model
from vllm_omni.diffusion.layers.rope import RotaryEmbedding

from gfdit.adapters import masked_tokens
from gfdit.adapters.sequence_plan import SequencePlan
from gfdit.omni.joint_attention import JointAttention, gather_tokens
from gfdit.omni.ring import GroupFreeRing, UlyssesOrRing, allow_ring
from gfdit.omni.split_tokens import split_tokens
from gfdit.omni.task_scope import GroupStandIn, TaskDegrees, TaskScope
from gfdit.omni.ulysses import GroupFreeUlysses


def put_in_groups(scope: TaskScope) -> tuple[Any, Any]:
    """Stand-ins take the places of vLLM-Omni's SP and CFG groups, for the whole process; returns those."""
    originals = parallel_state._SP, parallel_state._CFG
    parallel_state._SP, parallel_state._CFG = GroupStandIn(scope, "sp"), GroupStandIn(scope, "cfg")
    return originals


def put_groups_back(originals: tuple[Any, Any]) -> None:
    """So that vLLM-Omni's shutdown destroys its own."""
    parallel_state._SP, parallel_state._CFG = originals


class Exchange:
    """How the attention layers of a process exchange; one for all that is loaded into it."""

    def __init__(self, scope: TaskScope, *, ring: bool = False) -> None:
        self._scope = scope
        self._ring = ring
        ulysses = GroupFreeUlysses(scope)
        self._strategy = UlyssesOrRing(scope, ulysses, GroupFreeRing(scope)) if ring else ulysses

    def attach(
        self, root: torch.nn.Module, transformers: Sequence[torch.nn.Module], sequence_plan: SequencePlan | None
    ) -> bool:
        """Make ``transformers``, and all attention under ``root``, split what the running task says.

        The hooks are installed once, and at degree 1 they do nothing. ``sequence_plan`` takes the place of the
        transformers' own plan. Returns whether all layers' backends take masks; raises ``ValueError`` naming a
        layer that cannot be part of a ring, where there is one.
        """
        scope, strategy = self._scope, self._strategy
        chosen = strategy if sequence_plan is None else JointAttention(scope, strategy)
        takes_masks = True
        for name, module in root.named_modules():
            if isinstance(module, Attention) and not module.skip_sequence_parallel:
                module.parallel_strategy = chosen
                masked_tokens.watch_attention(module.attention)
                takes_masks &= _takes_masks(module)
                if self._ring:
                    allow_ring(module, name, scope)
            elif isinstance(module, RotaryEmbedding):
                masked_tokens.watch_rotation(module)
        for transformer, plan in plans_of(transformers, sequence_plan):
            split_tokens(transformer, TaskDegrees(scope), plan)
            if sequence_plan is not None:
                transformer.get_submodule(sequence_plan.gather).register_forward_hook(gather_tokens)
            transformer.register_forward_pre_hook(masked_tokens.begin_pass)
            if "img_ids" in plan.get("", ()) and hasattr(transformer, "pos_embed"):
                masked_tokens.watch_positions(transformer)
            for number, (block, _) in enumerate(masked_tokens.blocks_of(transformer)):
                enter = partial(masked_tokens.enter_block, number)
                block.register_forward_pre_hook(enter, with_kwargs=True)
            for name in gathers_of(plan, sequence_plan):
                transformer.get_submodule(name).register_forward_hook(masked_tokens.put_back)
        return takes_masks


def plans_of(
    transformers: Sequence[torch.nn.Module], sequence_plan: SequencePlan | None
) -> list[tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Of each that has one: ``sequence_plan``, or if that is None its own."""
    found = []
    for transformer in transformers:
        if plan := get_sp_plan_from_model(transformer) if sequence_plan is None else sequence_plan.splits:
            found.append((transformer, plan))
    return found


def gathers_of(plan: Mapping[str, Any], sequence_plan: SequencePlan | None) -> list[str]:
    """Modules where tokens that ``plan`` splits come together."""
    if sequence_plan is not None:
        return [sequence_plan.gather]
    return [name for name, entry in plan.items() if not isinstance(entry, dict)]


def _takes_masks(layer: Attention) -> bool:
    """As vLLM-Omni asks it before every call."""
    backend = layer.attn_backend
    return backend is None or backend.supports_attention_mask(getattr(layer, "attn_spec", None))
