"""LoRAs of a base transformer: read beside the steps, switched between them, never merged into its weights.

vLLM-Omni's manager wraps the layers that a LoRA changes; without an active one they compute what they did before.
Reading from disk needs no layer, so a thread does it while steps run. What is left to do between two steps, by the
thread that runs them, takes milliseconds.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import torch
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni.lora.utils import stable_lora_int_id

# How a checkpoint's projections are packed. vLLM-Omni's transformers say it when they are loaded, but for FLUX's.
_PACKED = [
    (".to_qkv", ".to_q", "q"),
    (".to_qkv", ".to_k", "k"),
    (".to_qkv", ".to_v", "v"),
    (".add_kv_proj", ".add_q_proj", "q"),
    (".add_kv_proj", ".add_k_proj", "k"),
    (".add_kv_proj", ".add_v_proj", "v"),
]
_NUM_KEPT = 8


class LoraSlot:
    """Of one loaded transformer, in the shell that holds it; one LoRA at a time is active.

    Every method but :meth:`read` belongs to the thread that runs the transformer.
    """

    def __init__(self, pipeline: Any, device: torch.device, dtype: torch.dtype) -> None:
        if not hasattr(pipeline.transformer, "stacked_params_mapping"):
            pipeline.transformer.stacked_params_mapping = _PACKED
        self._manager = DiffusionLoRAManager(pipeline, device, dtype, max_cached_adapters=_NUM_KEPT)
        self._reads: dict[str, Future[Any]] = {}
        self._active: tuple[str, float] | None = None

    def prepare(self, source: str) -> None:
        """Wrap the layers that it changes, which then is no work left for the step that first uses it.

        What is no LoRA is left for that step to refuse.
        """
        with contextlib.suppress(Exception):
            self._manager._replace_layers_with_lora(
                PEFTHelper.from_local_dir(source, max_position_embeddings=None)
            )

    def read(self, source: str) -> Future[Any]:
        """Begin to read it, once; the future is done when it may be used without a wait.

        Its exception is a ``ValueError`` of one line for what is no LoRA of this transformer.
        """
        if (begun := self._reads.get(source)) is not None:
            return begun
        future: Future[Any] = Future()
        self._reads[source] = future
        threading.Thread(target=self._read, args=(source, future), name="read LoRA", daemon=True).start()
        return future

    def use(self, source: str | None, scale: float = 1.0) -> None:
        """From the next pass on: this LoRA, or none. Waits for it to be read.

        Raises ``ValueError`` for one that fits in part only, or not at all; then none is active.
        """
        wanted = None if source is None else (source, scale)
        if wanted == self._active:
            return
        if source is None:
            self._manager._deactivate_all_adapters()
            self._active = None
            return
        try:
            lora, helper = self.read(source).result()
            self._register(source, lora, helper)
        except ValueError:
            self._manager._deactivate_all_adapters()
            self._active = None
            self._reads.pop(source, None)
            raise
        self._manager._activate_adapter(lora.id, scale)
        self._active = wanted

    @property
    def active(self) -> tuple[str, float] | None:
        """(source, scale)."""
        return self._active

    def _read(self, source: str, future: Future[Any]) -> None:
        try:
            future.set_result(self._manager._load_adapter(_request(source)))
        except Exception as error:
            reason = str(error).splitlines()[0]
            future.set_exception(ValueError(f"{source} cannot be read as a LoRA: {reason}"))

    def _register(self, source: str, lora: Any, helper: Any) -> None:
        manager = self._manager
        if lora.id in manager._registered_adapters:
            manager._touch_adapter_info(lora.id)
            return
        manager._replace_layers_with_lora(helper)
        unbound = sorted(set(lora.loras) - self._names())
        if unbound:
            raise ValueError(
                f"{source} fits in part only: the transformer has no layer for {len(unbound)} of its "
                f"{len(lora.loras)} modules, such as {unbound[0]}"
            )
        manager._evict_for_new_adapter()
        for forgotten in [name for name in self._reads if name != source and not self._is_kept(name)]:
            with contextlib.suppress(KeyError):
                del self._reads[forgotten]
        manager._touch_adapter_info(lora.id)
        manager._registered_adapters[lora.id] = lora

    def _is_kept(self, source: str) -> bool:
        """What is being read is not forgotten."""
        return not self._reads[source].done() or _id(source) in self._manager._registered_adapters

    def _names(self) -> set[str]:
        """Under which a LoRA may call the wrapped layers."""
        names = set()
        for full_name, layer in self._manager._lora_modules.items():
            prefix, _, own = full_name.rpartition(".")
            packed = self._manager._get_packed_sublayer_suffixes(own, getattr(layer, "n_slices", 1)) or []
            for name in (full_name, *(f"{prefix}.{sub}" for sub in packed)):
                names |= {name, name.partition(".")[2]}
        return names


def _id(source: str) -> int:
    return stable_lora_int_id(source)


def _request(source: str) -> LoRARequest:
    return LoRARequest(lora_name=source, lora_int_id=_id(source), lora_path=source)
