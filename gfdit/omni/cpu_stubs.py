"""Stand-ins for what torchvision and torchaudio lack beside a CPU-only torch.

No CPU wheels of either exist for the torch that vLLM pins: torchvision's compiled operators do not load, and
`import torchvision` needs two of them to exist; torchaudio is absent, and vLLM-Omni's API server imports it.
Image and video pipelines use neither. Whatever does use them gets an error that says so.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_TORCHAUDIO_MODULES = (
    "torchaudio",
    "torchaudio.functional",
    "torchaudio.transforms",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
)


def install() -> None:
    """Define what is missing, and only that. To be called before transformers is imported; idempotent."""
    _define_torchvision_operators()
    _define_torchaudio()


def _define_torchvision_operators() -> None:
    import torch

    if hasattr(torch.ops.torchvision, "nms") or _load_torchvision_library():
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", _NMS_SCHEMA)
        torch.library.impl(f"torchvision::{name}", "CPU")(_missing(f"torchvision.ops.{name}"))


def _load_torchvision_library() -> bool:
    """Whether the real operators load. torchvision does the same when imported; twice does no harm."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        return False
    return True


def _define_torchaudio() -> None:
    if "torchaudio" in sys.modules or importlib.util.find_spec("torchaudio") is not None:
        return
    for name in _TORCHAUDIO_MODULES:
        module = _StandInModule(name)
        # find_spec() raises on a module without a spec. Without a file and a version, transformers
        # takes the package for absent.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class _StandInModule(ModuleType):
    """A module in which every public name exists and raises when called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


def _missing(name: str) -> Callable[..., NoReturn]:
    def raise_missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not available beside a CPU-only torch (gfdit stand-in)")

    return raise_missing
