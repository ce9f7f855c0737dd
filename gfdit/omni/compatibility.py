"""Refuses, before anything starts, what cannot be elastic, and says why."""

from __future__ import annotations

import importlib
from typing import Any

#: Symbols of vLLM-Omni 0.30 that gfdit builds on, as (module, dotted attribute).
SYMBOLS = (
    ("vllm_omni.diffusion.attention.layer", "Attention"),
    ("vllm_omni.diffusion.data", "DiffusionOutput.from_exception"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._add_prepared_request"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._busy_loop"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._fail_engine"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._finalize_finished_request"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._init_execute_fn"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._init_executor"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._init_process_hooks"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._init_scheduler"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._make_dummy_request"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._prepare_request_for_admission"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._put_output"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._resolve_execution_mode"),
    ("vllm_omni.diffusion.diffusion_engine", "DiffusionEngine._run_rpc_task"),
    ("vllm_omni.diffusion.distributed.parallel_state", "_CFG"),
    ("vllm_omni.diffusion.distributed.parallel_state", "_SP"),
    ("vllm_omni.diffusion.distributed.sp_plan", "SequenceParallelInput"),
    ("vllm_omni.diffusion.distributed.sp_plan", "get_sp_plan_from_model"),
    ("vllm_omni.diffusion.forward_context", "get_forward_context"),
    ("vllm_omni.diffusion.forward_context", "set_forward_context"),
    ("vllm_omni.diffusion.hooks.sequence_parallel", "SequenceParallelSplitHook._shard_with_auto_pad"),
    ("vllm_omni.diffusion.hooks.sequence_parallel", "_get_submodule_by_name"),
    ("vllm_omni.diffusion.hooks.sequence_parallel", "apply_sequence_parallel"),
    ("vllm_omni.diffusion.ipc", "pack_diffusion_output_shm"),
    ("vllm_omni.diffusion.ipc", "unpack_diffusion_output_shm"),
    ("vllm_omni.diffusion.sched.interface", "StepBatchSamplingParamsKey"),
    ("vllm_omni.diffusion.worker.diffusion_model_runner", "DiffusionModelRunner.load_model"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "WorkerWrapperBase"),
    ("vllm_omni.diffusion.worker.input_batch", "InputBatch.make_batch"),
    ("vllm_omni.diffusion.worker.utils", "StepRequestState"),
)

_SHARDED = "its weights would be sharded at load, and every rank must be able to run any task"
_STATIC = "gfdit chooses it for every task; leave it at 1"
_STATE = "it keeps the state of one request in the model, and gfdit interleaves requests step by step"
_OFFLOAD = "moving weights during a forward pass does not go with a full replica per rank"


def check_symbols() -> None:
    """Raise ``ImportError`` naming the first symbol this vLLM-Omni lacks."""
    for module, path in SYMBOLS:
        target: Any = importlib.import_module(module)
        for name in path.split("."):
            if not hasattr(target, name):
                raise ImportError(f"gfdit needs {module}.{path}, which this vLLM-Omni does not have (needs 0.30)")
            target = getattr(target, name)


def check_config(od_config: Any) -> None:
    """Raise ``ValueError`` naming a setting of ``OmniDiffusionConfig`` that gfdit cannot work with, and why."""
    parallel = od_config.parallel_config
    refused = (
        ("tensor_parallel_size", parallel.tensor_parallel_size > 1, _SHARDED),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, _SHARDED),
        ("use_hsdp", parallel.use_hsdp, _SHARDED),
        ("enable_expert_parallel", parallel.enable_expert_parallel, _SHARDED),
        ("text_encoder_tp_size", parallel.text_encoder_tp_size > 1, _SHARDED),
        ("ulysses_degree", parallel.ulysses_degree > 1, _STATIC),
        ("ring_degree", parallel.ring_degree > 1, _STATIC),
        ("allgather_degree", parallel.allgather_degree > 1, _STATIC),
        ("cfg_parallel_size", parallel.cfg_parallel_size > 1, _STATIC),
        ("vae_patch_parallel_size", parallel.vae_patch_parallel_size > 1, _STATIC),
        ("ulysses_mode", parallel.ulysses_mode != "strict", "only 'strict' is supported"),
        ("enable_cpu_offload", od_config.enable_cpu_offload, _OFFLOAD),
        ("enable_layerwise_offload", od_config.enable_layerwise_offload, _OFFLOAD),
        (
            "enable_distributed_layerwise_offload",
            getattr(od_config, "enable_distributed_layerwise_offload", False),
            _OFFLOAD,
        ),
        ("cache_backend", od_config.cache_backend not in (None, "none"), _STATE),
        (
            "diffusion_kv_cache_skip_steps",
            bool(od_config.diffusion_kv_cache_skip_steps),
            "steps run one by one, and attention is not told which one it is part of",
        ),
        (
            "streaming_output",
            od_config.streaming_output,
            "chunks of one request cannot leave before its end yet",
        ),
        (
            "diffusion_compile_granularity",
            not od_config.enforce_eager and od_config.diffusion_compile_granularity == "full",
            "a graph of the whole model would contain the collectives of one degree; use 'regional'",
        ),
    )
    for name, wrong, reason in refused:
        if wrong:
            raise ValueError(f"gfdit does not support {name}: {reason}")
    mode = getattr(od_config.diffusion_kv_mode, "value", od_config.diffusion_kv_mode)
    if mode != "dense_legacy":
        raise ValueError(f"gfdit does not support diffusion_kv_mode {mode!r}, only 'dense_legacy'")
