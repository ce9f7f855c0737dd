"""A pipeline as it was loaded: what it and its modules keep on themselves besides parameters."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch

_OWN_TO_TORCH = frozenset(vars(torch.nn.Module()))
# By this transformers knows that it has installed hooks: hooks stay, and must not be installed again.
_MARK_OF_HOOKS = frozenset({"_output_capturing_hooks_installed"})


def transformers_of(pipeline: Any) -> list[torch.nn.Module]:
    """The denoising models of a pipeline, each once, by vLLM-Omni's names for them."""
    found: dict[int, torch.nn.Module] = {}
    for name in getattr(pipeline, "_dit_modules", None) or ("transformer", "transformer_2"):
        try:
            module = attrgetter(name)(pipeline)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Module):
            found[id(module)] = module
    return list(found.values())


class LoadedState:
    """Remembers the attributes of a pipeline and all its modules; :meth:`restore` puts them back.

    So a task finds what it would find on a rank that has never seen any request: attributes set since are gone,
    lists and dictionaries and schedulers have their first content. Parameters, buffers and hooks stay, and so does
    what hides elsewhere: in closures, caches of functions, objects inside objects.
    """

    def __init__(self, pipeline: torch.nn.Module) -> None:
        self._modules = [(module, _attributes(module)) for module in pipeline.modules()]
        self._containers = [
            (value, copy.copy(value))
            for _, attributes in self._modules
            for value in attributes.values()
            if type(value) in (dict, list, set)  # not the frozen ones of configurations
        ]
        self._schedulers = [
            (value, copy.deepcopy(vars(value)))
            for _, attributes in self._modules
            for value in attributes.values()
            if hasattr(value, "set_timesteps")
        ]

    def restore(self) -> None:
        for module, attributes in self._modules:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        for scheduler, content in self._schedulers:
            vars(scheduler).clear()
            vars(scheduler).update(copy.deepcopy(content))


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    kept = _OWN_TO_TORCH | _MARK_OF_HOOKS
    return {name: value for name, value in vars(module).items() if name not in kept}
