"""What a request sets on the pipeline, put on while it runs and taken off while others do.

Stock keeps on the pipeline what belongs to one request: guidance scales, the current timestep, a scheduler with
its history. Every request gets its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from gfdit.adapters.forward.step_caches import is_state

# Of modules, and of what wraps them: no request changes it.
_OWN_TO_TORCH = frozenset(vars(torch.nn.Module())) | {
    "forward",
    "_compiled_call_impl",
    "_hook_registry",
    "_omni_original_forward",
}
_MISSING = object()

State = list[dict[str, Any]]


def is_scheduler(value: Any) -> bool:
    return callable(getattr(value, "step", None)) and hasattr(value, "set_timesteps")


def clone_of(scheduler: Any) -> Any:
    """A copy of its own. Not by ``copy.deepcopy``, in which wrappers around schedulers recurse for ever."""
    clone = object.__new__(type(scheduler))
    for name, value in vars(scheduler).items():
        vars(clone)[name] = clone_of(value) if is_scheduler(value) else copy.deepcopy(value)
    return clone


class Overlay:
    """Of the attributes of ``modules``, then ``caches``, as they are now: what requests find when they begin."""

    def __init__(self, modules: Iterable[Any], caches: Iterable[Any] = ()) -> None:
        self._modules = list(modules)
        self.num_modules = len(self._modules)
        self._modules += caches
        self._base = [_attributes(module) for module in self._modules]
        self._pristine = [
            {name: _copy_of(value) for name, value in base.items() if _is_own(value)} for base in self._base
        ]

    def fresh(self) -> State:
        """Of a request that has not begun: schedulers and containers of its own."""
        return [{name: _copy_of(value) for name, value in own.items()} for own in self._pristine]

    def put_on(self, state: State) -> None:
        for module, own in zip(self._modules, state, strict=True):
            vars(module).update(own)

    def take_off(self) -> State:
        """What differs from the base, which is put back."""
        state = []
        for module, base in zip(self._modules, self._base, strict=True):
            attributes = vars(module)
            own = {
                name: value
                for name, value in attributes.items()
                if name not in _OWN_TO_TORCH and base.get(name, _MISSING) is not value
            }
            for name in own:
                if name in base:
                    attributes[name] = base[name]
                else:
                    del attributes[name]
            state.append(own)
        return state


def _copy_of(value: Any) -> Any:
    return clone_of(value) if is_scheduler(value) else copy.deepcopy(value)


def _attributes(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN_TO_TORCH}


def _is_own(value: Any) -> bool:
    """Whether a request may change it in place."""
    if is_scheduler(value) or is_state(value):
        return True
    return type(value) in (dict, list, set) and _is_plain(value)


def _is_plain(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return all(value is None or isinstance(value, (str, int, float, bool, torch.Tensor)) for value in values)
