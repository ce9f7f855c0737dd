"""Where the ``forward`` of a pipeline can be cut: calls of its models and schedulers, reported to who runs it.

Installed once, on the loaded pipeline: on methods of the instance, on modules from outside of their hooks, and on
the classes of schedulers, because forwards replace and copy these. Outside of a
:class:`~gfdit.adapters.forward.run.Run` all of them do what they did before. A call inside of another one is part
of it.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import Any, Protocol

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from gfdit.adapters.forward.overlay import is_scheduler

PREDICTORS = ("predict_noise_maybe_with_cfg", "predict_noise_with_multi_branch_cfg")
_ENCODING_METHOD = re.compile(r"_?encode_|_?get_\w*_embeds?$|_?get_\w*_embeddings?$")
_OF_ENCODERS = ("generate",)


class Kind(StrEnum):
    """What a call makes."""

    ENCODER = "encoder"  # depends on the prompt and given images alone
    DENOISER = "denoiser"  # a noise prediction
    STEP = "step"  # of a scheduler
    DECODER = "decoder"


class Listener(Protocol):
    """What runs a forward is told of its calls and makes them, or answers them otherwise."""

    #: Whether a call is under way that was reported.
    is_inside: bool

    def call(
        self, kind: Kind, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class _Here(threading.local):
    listener: Listener | None = None


_here = _Here()


def listen(listener: Listener | None) -> None:
    """Calls on this thread are reported to ``listener`` from now on."""
    _here.listener = listener


def denoisers_of(root: Any, names: tuple[str, ...] | None = None) -> dict[str, torch.nn.Module]:
    """The denoising models by name, each once; ``names`` in place of vLLM-Omni's own for them."""
    found: dict[str, torch.nn.Module] = {}
    for name in names or getattr(root, "_dit_modules", None) or ("transformer", "transformer_2", "unet"):
        try:
            module = attrgetter(name)(root)
        except AttributeError:
            continue
        if isinstance(module, torch.nn.Module) and not any(module is other for other in found.values()):
            found[name] = module
    return found


def install(root: Any, denoisers: dict[str, torch.nn.Module]) -> None:
    """Report the calls of the parts of ``root``, a pipeline, on threads that :func:`listen`."""
    for name in PREDICTORS:
        if callable(getattr(root, name, None)):
            setattr(root, name, _reported(Kind.DENOISER, name, getattr(root, name)))
    for name, module in denoisers.items():
        _report_module(Kind.DENOISER, name, module)
    for name in dir(type(root)):
        if _ENCODING_METHOD.match(name) and callable(getattr(type(root), name)):
            setattr(root, name, _reported(Kind.ENCODER, name, getattr(root, name)))
    for name, module in _parts_of(root).items():
        if any(module is denoiser for denoiser in denoisers.values()):
            continue
        if callable(getattr(module, "decode", None)) and callable(getattr(module, "encode", None)):
            for kind, method in ((Kind.ENCODER, "encode"), (Kind.DECODER, "decode")):
                setattr(module, method, _reported(kind, f"{name}.{method}", getattr(module, method)))
            continue
        _report_module(Kind.ENCODER, name, module)
        for method in _OF_ENCODERS:
            if callable(getattr(module, method, None)):
                setattr(module, method, _reported(Kind.ENCODER, f"{name}.{method}", getattr(module, method)))
    for cls in _subclasses(SchedulerMixin):
        _report_steps(cls)
    report_schedulers(root)


def report_schedulers(root: Any) -> None:
    """Those that ``root`` has now: forwards replace them."""
    for value in list(vars(root).values()):
        if is_scheduler(value):
            _report_steps(type(value))


def _parts_of(root: Any) -> dict[str, torch.nn.Module]:
    """Of a pipeline of vLLM-Omni, which is a module, or of diffusers, which has modules among its attributes."""
    if isinstance(root, torch.nn.Module):
        return dict(root.named_children())
    return {name: value for name, value in vars(root).items() if isinstance(value, torch.nn.Module)}


def _reported(kind: Kind, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        listener = _here.listener
        if listener is None or listener.is_inside:
            return fn(*args, **kwargs)
        return listener.call(kind, name, fn, args, kwargs)

    return call


def _report_module(kind: Kind, name: str, module: torch.nn.Module) -> None:
    """Around hooks, and without touching ``forward``, whose signature others look at."""
    inner = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = _reported(kind, name, inner)


def _report_steps(cls: type) -> None:
    owner = next((one for one in cls.__mro__ if "step" in vars(one)), None)
    if owner is None or hasattr(vars(owner)["step"], "_gfdit_reported"):
        return
    original = vars(owner)["step"]

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _here.listener
        if listener is None or listener.is_inside:
            return original(self, *args, **kwargs)
        return listener.call(Kind.STEP, type(self).__name__, functools.partial(original, self), args, kwargs)

    step._gfdit_reported = True  # type: ignore[attr-defined]
    owner.step = step  # type: ignore[attr-defined]


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [one for subclass in direct for one in (subclass, *_subclasses(subclass))]
