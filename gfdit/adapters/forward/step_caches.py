"""TeaCache and cache-dit: what they keep of a request's earlier steps, and who agrees on which steps are skipped.

A step cache skips the blocks of steps whose input is like that of the step before, and adds what they made then.
What it keeps for that is in objects on the transformer, which know one request: TeaCache's hook, cache-dit's
manager of contexts. Here every request has its own, which is part of its latents' artifact.

What is kept under sequence or CFG parallelism is of one rank's share: a request that goes on in another layout,
or with a rank that has nothing, computes its next step in full. All ranks of a layout ask each other, because one
that skips a step does not take part in the collectives of those that compute it. cache-dit would have every rank
decide for itself, or all processes of the server; here the ranks of the running task decide, by their mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
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

Attributes = list[dict[str, Any]]
_CONTEXTS = "_cached_context_manager"  # of cache-dit's manager: contexts by name
_CURRENT = "_current_context"
_OF_CACHES = ("vllm_omni.", "cache_dit.")


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

    @property
    def size(self) -> int:
        return self.sp * self.cfg


@dataclass(frozen=True, slots=True)
class Share:
    """Attributes of all holders, with a number in place of each tensor.

    It has no ``__dict__``, so its tensors are no fields of the artifact: a field is the same on all ranks, and may
    come from several of them.
    """

    skeleton: Any
    tensors: tuple[torch.Tensor, ...]


class Kept(NamedTuple):
    """``num_passes``: passes of a transformer that the caches have counted."""

    place: Place
    num_passes: int
    share: Share


class _Slot(NamedTuple):
    """In place of a tensor."""

    number: int


class StepCaches:
    """Of the denoising models of one loaded pipeline.

    ``holders`` are the objects whose attributes belong to a request.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        registries = [getattr(module, "_hook_registry", None) for module in modules]
        hooks = [hook for registry in registries if registry is not None for hook in registry._hooks.values()]
        managers = {id(one): one for module in modules if (one := getattr(module, "_context_manager", None))}
        for manager in managers.values():
            _have_ranks_agree(manager)
        self.holders = [*(hook for hook in hooks if hasattr(hook, "state_manager")), *managers.values()]
        # Contexts are named after addresses, which differ from rank to rank.
        self._names = [name for module in modules for name in getattr(module, "_context_names", ())]

    def share_of(self, attributes: Attributes) -> Share:
        """A copy, with which ``attributes`` have no object in common that a step changes."""
        portable = []
        for own in attributes:
            portable.append({name: value for name, value in own.items() if name != _CURRENT})
            if _CONTEXTS in own:
                portable[-1][_CONTEXTS] = [own[_CONTEXTS].get(name) for name in self._names]
        tensors: list[torch.Tensor] = []

        def take_out(tensor: torch.Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(len(tensors) - 1)

        return Share(_copied(portable, torch.Tensor, take_out, {}), tuple(tensors))

    def attributes_of(self, share: Share) -> Attributes:
        """Inverse of :meth:`share_of`; tensors, which no step changes, are shared."""
        attributes: Attributes = _copied(share.skeleton, _Slot, lambda slot: share.tensors[slot.number], {})
        for own in attributes:
            if _CONTEXTS in own:
                contexts = zip(self._names, own[_CONTEXTS], strict=True)
                own[_CONTEXTS] = {name: context for name, context in contexts if context is not None}
                for name, context in own[_CONTEXTS].items():
                    context.name = name
        return attributes

    def kept(self, share: Share) -> Kept:
        """What goes into the artifact of the running task."""
        return Kept(Place.here(), _num_passes(share), share)

    def to_go_on_from(self, kept: Kept | None, at_start: Share, device: torch.device) -> Attributes:
        """For a step of the running task, agreed upon by its ranks.

        What was kept, if every rank has its own share of it. Else what the request began with; cache-dit's
        counters go on if all ranks have the same, so that a request does not warm up again.
        """
        here = Place.here()
        num_passes = kept.num_passes if kept is not None and kept.place.cfg == here.cfg else -1
        said = [[float(kept is not None and kept.place == here), float(num_passes)]]
        if here.size > 1:
            own_word = torch.tensor(said, device=device)
            said = get_cfg_group().all_gather(get_sp_group().all_gather(own_word)).tolist()
        if kept is None or num_passes < 0 or len({passes for _, passes in said}) > 1:
            return self.attributes_of(at_start)
        attributes = self.attributes_of(kept.share)
        if all(knows for knows, _ in said):
            return attributes
        return [
            _emptied(own) if _CONTEXTS in own else first
            for own, first in zip(attributes, self.attributes_of(at_start), strict=True)
        ]


def is_state(value: Any) -> bool:
    """Whether an attribute of a holder is what it keeps of a request."""
    if isinstance(value, dict):
        return any(hasattr(context, "transformer_executed_steps") for context in value.values())
    return hasattr(value, "get_state") and not isinstance(value, torch.Generator)


def _num_passes(share: Share) -> int:
    total = 0
    for own in share.skeleton:
        contexts = own.get(_CONTEXTS, ())
        total += sum(context.transformer_executed_steps for context in contexts if context is not None)
        total += own.get("_forward_cnt", 0)  # TeaCache
    return total


def _emptied(own: dict[str, Any]) -> dict[str, Any]:
    """cache-dit's contexts without what they know of steps before, but for their number."""
    for context in own[_CONTEXTS].values():
        context.buffers = {}
        context.continuous_cached_steps = context.cfg_continuous_cached_steps = 0
        for calibrator in (*context.get_calibrators(), *context.get_cfg_calibrators()):
            if calibrator is not None:
                calibrator.reset_cache()
    return own


def _copied(value: Any, leaf: type, replace: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """A copy of ``value`` and of all containers and caches' objects in it, with ``replace`` applied to leaves."""
    if isinstance(value, leaf):
        return replace(value)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, dict):
        made = memo[id(value)] = copy.copy(value)
        for key, inner in value.items():
            made[key] = _copied(inner, leaf, replace, memo)
        return made
    if type(value) in (list, tuple, set):
        made = memo[id(value)] = type(value)(_copied(inner, leaf, replace, memo) for inner in value)
        return made
    if type(value).__module__.startswith(_OF_CACHES) and not isinstance(value, (type, Enum)):
        made = memo[id(value)] = copy.copy(value)
        for name, inner in vars(value).items():
            vars(made)[name] = _copied(inner, leaf, replace, memo)
        return made
    return value


def _have_ranks_agree(manager: Any) -> None:
    """Have a manager of cache-dit decide for all ranks of the running task, and skip no step after an unknown one.

    cache-dit compares means of a rank's tensors, and averages them over ``torch.distributed``'s world if that has
    several processes. The world of an elastic rank has one.
    """
    if "similarity" in vars(manager):
        return
    similarity, can_cache = manager.similarity, manager.can_cache

    def agreed(before: torch.Tensor, now: torch.Tensor, *, parallelized: bool = False, **how: Any) -> bool:
        if (size := Place.here().size) > 1 and before.shape == now.shape:
            means = torch.stack(((before - now).abs().mean(), before.abs().mean())).float()
            for group in (get_sp_group(), get_cfg_group()):
                means = group.all_reduce(means) if group.world_size > 1 else means
            difference, magnitude = 2 * means / size
            zero = torch.zeros_like(magnitude)  # two tensors of exactly these means
            before, now = torch.stack((zero, magnitude)), torch.stack((difference, magnitude))
        return bool(similarity(before, now, parallelized=False, **how))

    def can_cache_here(states: torch.Tensor, *args: Any, prefix: str = "Fn", **how: Any) -> bool:
        if manager.get_Fn_buffer(prefix) is None:  # a mask of steps may say so, after a change of layout
            return False
        return bool(can_cache(states, *args, prefix=prefix, **how))

    manager.similarity, manager.can_cache = agreed, can_cache_here
