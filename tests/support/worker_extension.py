"""Mixed into the workers of a test engine (vLLM-Omni's ``worker_extension_cls``): a tripwire, and sabotage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing import shared_memory
from typing import Any

import torch.distributed as dist

COLLECTIVES = (
    "new_group",
    "split_group",
    "init_process_group",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


class TestExtension:
    """Methods callable on every rank through ``collective_rpc``."""

    def arm_tripwire(self) -> None:
        """From now on, creating or using a process group fails and is counted."""
        self._hits: list[str] = []
        for name in COLLECTIVES:
            setattr(dist, name, self._trap(name))

    def _trap(self, name: str) -> Callable[..., Any]:
        def tripped(*args: Any, **kwargs: Any) -> None:
            self._hits.append(name)
            raise RuntimeError(f"torch.distributed.{name} used while serving")

        return tripped

    def tripwire_hits(self) -> list[str]:
        return self._hits

    def trip(self) -> str:
        """Negative control of the tripwire."""
        try:
            dist.new_group([0])
        except RuntimeError as error:
            return str(error)
        return ""

    def name_results(self, beginning: str) -> str:
        """From now on names of shared memory that this worker makes begin so, like the one that is returned."""
        shared_memory._SHM_NAME_PREFIX = f"/{beginning}"  # type: ignore[attr-defined]
        made = shared_memory.SharedMemory(create=True, size=1)
        made.close()
        made.unlink()
        return made.name

    def announce_degree(self, on: bool) -> None:
        """With ``on=False`` a task's degree is not announced to the model: a sabotage that must be seen."""
        from gfdit.omni.task_scope import TaskScope

        original = self._original(TaskScope, "enter")

        @contextmanager
        def silent_enter(scope: TaskScope, layout: Any, parallel_config: Any, **rest: Any) -> Any:
            with original(scope, layout, parallel_config, **rest):
                parallel_config.sequence_parallel_size = 1
                yield

        setattr(TaskScope, "enter", original if on else silent_enter)  # noqa: B010

    def fail_on(self, rank: int | None) -> None:
        """Make one rank fail in the middle of every parallel step, while its peers wait for it; None: no more."""
        from gfdit.omni.ulysses import GroupFreeUlysses

        original = self._original(GroupFreeUlysses, "pre_attention")

        def failing(strategy: Any, *args: Any, **kwargs: Any) -> Any:
            if strategy._scope.rank == rank:
                raise RuntimeError("sabotage")
            return original(strategy, *args, **kwargs)

        setattr(GroupFreeUlysses, "pre_attention", original if rank is None else failing)  # noqa: B010

    def watch_pipeline(self) -> None:
        """Count the requests in each pass of the transformer, and keep the latents that are decoded."""
        self._batches: list[int] = []
        self._latents: dict[int, Any] = {}
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        cls = type(pipeline)
        forward, decode = cls.forward, cls._decode_latents
        running = threading.local()

        def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self._batches.append(len(kwargs["hidden_states"]))

        def watched_forward(pipeline: Any, batch: Any, *args: Any) -> Any:
            running.seed = batch.requests[0].sampling_params.seed
            return forward(pipeline, batch, *args)

        def watched_decode(pipeline: Any, latents: Any, *args: Any) -> Any:
            self._latents[running.seed] = latents.numpy().copy()
            return decode(pipeline, latents, *args)

        pipeline.transformer.register_forward_pre_hook(count, with_kwargs=True)
        cls.forward, cls._decode_latents = watched_forward, watched_decode

    def seen(self) -> tuple[list[int], dict[int, Any]]:
        """(requests per denoising pass, decoded latents by seed) since the last call."""
        seen = self._batches, self._latents
        self._batches, self._latents = [], {}
        return seen

    def prompt_cache(self) -> dict[str, int]:
        """Hits and misses of vLLM-Omni's cache of prompt embeddings."""
        return self.model_runner.pipeline._prompt_embed_cache.stats()  # type: ignore[attr-defined]

    def lora_cache(self) -> tuple[list[int], int | None]:
        """(loaded adapters, the active one) by id."""
        manager = self.lora_manager  # type: ignore[attr-defined]
        return manager.list_adapters(), manager._active_adapter_id

    def _original(self, owner: type, name: str) -> Callable[..., Any]:
        """The method as it was before any sabotage."""
        if not hasattr(self, "_originals"):
            self._originals: dict[tuple[type, str], Callable[..., Any]] = {}
        return self._originals.setdefault((owner, name), getattr(owner, name))
