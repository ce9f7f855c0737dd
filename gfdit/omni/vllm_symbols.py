"""What of vLLM and vLLM-Omni 0.30 gfdit imports and derives from, looked for before anything starts.

``tests/omni_cpu/test_compatibility.py`` reads the same off the code, and fails if something is missing here;
``tests/support/vllm_uses.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Names that are imported, by module.
SYMBOLS: Mapping[str, tuple[str, ...]] = {
    "vllm.logger": ("init_logger",),
    "vllm.platforms.interface": (
        "DeviceCapability",
        "Platform",
        "PlatformEnum",
        "PlatformEnum.OOT",
    ),
    "vllm.transformers_utils.config": ("get_hf_file_to_dict",),
    "vllm.v1.engine.exceptions": ("EngineDeadError",),
    "vllm_omni.diffusion.attention.backends.abstract": ("AttentionMetadata",),
    "vllm_omni.diffusion.attention.backends.sdpa": (
        "SDPABackend",
        "SDPABackend.get_impl_cls",
        "SDPAImpl",
    ),
    "vllm_omni.diffusion.attention.layer": ("Attention",),
    "vllm_omni.diffusion.attention.parallel.base": ("ParallelAttentionContext",),
    "vllm_omni.diffusion.data": (
        "DiffusionOutput",
        "OmniDiffusionConfig",
    ),
    "vllm_omni.diffusion.diffusion_engine": (
        "DiffusionEngine",
        "DiffusionExecutionMode",
        "DiffusionExecutionMode.REQUEST_BATCH",
        "_RpcTask",
    ),
    "vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor": (
        "DistributedOperator",
        "DistributedVaeExecutor",
        "DistributedVaeMixin",
    ),
    "vllm_omni.diffusion.distributed.parallel_state": (
        "_CFG",
        "_SP",
        "get_cfg_group",
        "get_classifier_free_guidance_rank",
        "get_classifier_free_guidance_world_size",
        "get_sequence_parallel_rank",
        "get_sequence_parallel_world_size",
        "get_sp_group",
    ),
    "vllm_omni.diffusion.distributed.sp_plan": (
        "SequenceParallelInput",
        "get_sp_plan_from_model",
    ),
    "vllm_omni.diffusion.distributed.sp_sharding": ("sp_gather",),
    "vllm_omni.diffusion.executor.abstract": ("DiffusionExecutor",),
    "vllm_omni.diffusion.forward_context": (
        "get_forward_context",
        "is_forward_context_available",
        "set_forward_context",
    ),
    "vllm_omni.diffusion.hooks": (
        "HookRegistry",
        "HookRegistry.get_or_create",
    ),
    "vllm_omni.diffusion.hooks.sequence_parallel": (
        "SequenceParallelSplitHook",
        "_get_submodule_by_name",
        "apply_sequence_parallel",
    ),
    "vllm_omni.diffusion.ipc": (
        "pack_diffusion_output_shm",
        "unpack_diffusion_output_shm",
    ),
    "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2": (
        "resolve_wan_flow_shift",
        "resolve_wan_guidance_scales",
        "resolve_wan_sample_solver",
    ),
    "vllm_omni.diffusion.request": ("OmniDiffusionRequest",),
    "vllm_omni.diffusion.sched": ("RequestScheduler",),
    "vllm_omni.diffusion.sched.interface": (
        "DiffusionRequestStatus",
        "DiffusionRequestStatus.FINISHED_ABORTED",
        "DiffusionRequestStatus.FINISHED_COMPLETED",
        "DiffusionRequestStatus.FINISHED_ERROR",
        "DiffusionRequestStatus.RUNNING",
        "SchedulerRequestState",
        "StepBatchSamplingParamsKey",
    ),
    "vllm_omni.diffusion.utils.hf_utils": ("get_diffusion_model_index",),
    "vllm_omni.diffusion.worker.diffusion_model_runner": ("DiffusionModelRunner",),
    "vllm_omni.diffusion.worker.diffusion_worker": (
        "DiffusionWorker",
        "WorkerWrapperBase",
    ),
    "vllm_omni.diffusion.worker.request_batch": ("DiffusionRequestBatch",),
    "vllm_omni.diffusion.worker.utils": ("RunnerOutput",),
    "vllm_omni.entrypoints.omni_base": ("omni_snapshot_download",),
    "vllm_omni.errors": ("OmniClientError",),
    "vllm_omni.platforms": (
        "current_omni_platform",
        "current_omni_platform.device_type",
        "current_omni_platform.dist_backend",
        "current_omni_platform.empty_cache",
        "current_omni_platform.get_device_count",
        "current_omni_platform.is_available",
        "current_omni_platform.synchronize",
    ),
    "vllm_omni.platforms.interface": (
        "OmniPlatform",
        "OmniPlatformEnum",
        "OmniPlatformEnum.OOT",
    ),
    "vllm_omni.plugins": ("load_omni_general_plugins",),
}

#: Members of classes that gfdit derives from, with the parameters of methods that it overrides.
MEMBERS: Mapping[str, Mapping[str, str | None]] = {
    "vllm.platforms.interface:Platform": {
        "check_if_supports_dtype": "cls, dtype",
        "device_control_env_var": None,
        "dispatch_key": None,
        "dist_backend": None,
        "get_current_memory_usage": "cls, device",
        "get_device_capability": "cls, device_id",
        "get_device_name": "cls, device_id",
        "get_device_total_memory": "cls, device_id",
        "get_device_uuid": "cls, device_id",
        "is_pin_memory_available": "cls",
        "manual_seed_all": "cls, seed",
        "set_device": "cls, device",
        "simple_compile_backend": None,
    },
    "vllm_omni.diffusion.attention.backends.abstract:AttentionImpl": {
        "forward": "self, query, key, value, attn_metadata",
    },
    "vllm_omni.diffusion.attention.backends.sdpa:SDPABackend": {
        "get_impl_cls": "",
    },
    "vllm_omni.diffusion.attention.backends.sdpa:SDPAImpl": {
        "_forward_impl": None,
    },
    "vllm_omni.diffusion.diffusion_engine:DiffusionEngine": {
        "_abort_requests": "self, request_ids",
        "_add_prepared_request": "self, request",
        "_busy_loop": "self",
        "_check_and_start_background_loop": "self",
        "_fail_engine": None,
        "_fail_pending_rpcs": "self, exc",
        "_finalize_finished_request": None,
        "_init_execute_fn": "self",
        "_init_executor": "self, od_config",
        "_init_process_hooks": "self, od_config",
        "_init_runtime_state": "self",
        "_init_scheduler": (
            "self, od_config, scheduler, kv_cache_config, scheduler_block_size, hash_block_size, kv_vllm_config"
        ),
        "_make_dummy_request": None,
        "_open_scheduling_gate": None,
        "_prepare_request_for_admission": "self, request",
        "_process_aborts_queue": None,
        "_process_rpc_queue": None,
        "_put_output": None,
        "_resolve_execution_mode": "self, od_config",
        "_run_rpc_task": "self, task",
        "_scheduling_paused": None,
        "_submit_rpc": "self, method, timeout, args, kwargs, unique_reply_rank",
        "abort": "self, request_id",
        "close": None,
        "default_diffusion_model_runner_cls": None,
        "run_startup_warmup": "self",
    },
    ("vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor:DistributedVaeExecutor"): {
        "__init__": "self",
        "_balance_tasks": None,
        "execute": "self, z, operator, broadcast_result",
    },
    "vllm_omni.diffusion.executor.abstract:DiffusionExecutor": {
        "__init__": "self, od_config",
        "_init_executor": "self",
        "check_health": "self",
        "collective_rpc": "self, method, timeout, args, kwargs, unique_reply_rank, exec_all_ranks",
        "execute_batch": "self, scheduler_output",
        "execute_request": "self, scheduler_output",
        "execute_step": "self, scheduler_output",
        "is_dead": None,
        "register_failure_callback": "self, callback",
        "shutdown": "self",
        "uses_multiproc": None,
    },
    "vllm_omni.diffusion.hooks.sequence_parallel:SequenceParallelSplitHook": {
        "_shard_with_auto_pad": "self, x, dim, shard_group",
    },
    "vllm_omni.diffusion.sched.base_scheduler:BaseScheduler": {
        "__init__": "self",
        "get_request_state": None,
        "pop_request_state": "self, request_id",
    },
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker": {
        "init_device": "self",
    },
    "vllm_omni.platforms.interface:OmniPlatform": {
        "get_default_stage_config_path": "cls",
        "get_diffusion_attn_backend_cls": "cls, selected_backend, head_size, allow_trtllm_default",
        "supports_cpu_offload": "cls",
        "supports_torch_inductor": "cls",
    },
}
