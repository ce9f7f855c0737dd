"""What of vLLM and vLLM-Omni gfdit imports and derives from, looked for before anything starts.

``tests/omni_cpu/test_compatibility.py`` reads the same off the code, and fails if something is missing here;
``tests/support/vllm_uses.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Of both, from which the tables are written.
VERSION = "0.30.0"

#: Names that are imported, by module, with the parameters of functions.
SYMBOLS: Mapping[str, Mapping[str, str | None]] = {
    "vllm.config": {
        "LoadConfig": None,
        "set_current_vllm_config": "vllm_config, check_compile=, prefix=",
    },
    "vllm.entrypoints.serve.middleware.authenticate": {
        "AuthenticationMiddleware": None,
    },
    "vllm.envs": {
        "VLLM_CONFIGURE_LOGGING": None,
        "VLLM_LOGGING_CONFIG_PATH": None,
    },
    "vllm.logger": {
        "DEFAULT_LOGGING_CONFIG": None,
        "init_logger": "name",
    },
    "vllm.lora.peft_helper": {
        "PEFTHelper": None,
        "PEFTHelper.from_local_dir": "cls, lora_path, max_position_embeddings, tensorizer_config_dict=",
    },
    "vllm.lora.request": {
        "LoRARequest": None,
    },
    "vllm.model_executor.kernels.linear": {
        "register_linear_kernel": "kernel_class, platform, kernel_type=",
    },
    "vllm.model_executor.kernels.linear.scaled_mm.pytorch": {
        "PerTensorTorchFP8ScaledMMLinearKernel": None,
    },
    "vllm.platforms.interface": {
        "DeviceCapability": None,
        "Platform": None,
        "PlatformEnum": None,
        "PlatformEnum.OOT": None,
    },
    "vllm.transformers_utils.config": {
        "get_hf_file_to_dict": "file_name, model, revision=",
    },
    "vllm.utils.gc_utils": {
        "freeze_gc_heap": "",
    },
    "vllm.v1.engine.exceptions": {
        "EngineDeadError": None,
    },
    "vllm_omni.diffusion.attention.backends.abstract": {
        "AttentionMetadata": None,
    },
    "vllm_omni.diffusion.attention.backends.sdpa": {
        "SDPABackend": None,
        "SDPABackend.get_impl_cls": "",
        "SDPAImpl": None,
    },
    "vllm_omni.diffusion.attention.layer": {
        "Attention": None,
    },
    "vllm_omni.diffusion.attention.parallel.base": {
        "ParallelAttentionContext": None,
    },
    "vllm_omni.diffusion.data": {
        "DiffusionOutput": None,
        "OmniDiffusionConfig": None,
        "OmniDiffusionConfig.from_kwargs": "cls, **kwargs",
    },
    "vllm_omni.diffusion.diffusion_engine": {
        "DiffusionEngine": None,
        "DiffusionExecutionMode": None,
        "DiffusionExecutionMode.REQUEST_BATCH": None,
        "_RpcTask": None,
    },
    "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl": {
        "DistributedAutoencoderKL": None,
    },
    "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage": {
        "DistributedAutoencoderKLQwenImage": None,
    },
    "vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor": {
        "DistributedOperator": None,
        "DistributedVaeExecutor": None,
        "DistributedVaeMixin": None,
    },
    "vllm_omni.diffusion.distributed.parallel_state": {
        "_CFG": None,
        "_SP": None,
        "get_cfg_group": "",
        "get_classifier_free_guidance_rank": "",
        "get_classifier_free_guidance_world_size": "",
        "get_sequence_parallel_rank": "",
        "get_sequence_parallel_world_size": "",
        "get_sp_group": "",
    },
    "vllm_omni.diffusion.distributed.sp_plan": {
        "SequenceParallelInput": None,
        "get_sp_plan_from_model": "model",
    },
    "vllm_omni.diffusion.distributed.sp_sharding": {
        "sp_gather": "tensor, dim, validate=",
    },
    "vllm_omni.diffusion.executor.abstract": {
        "DiffusionExecutor": None,
    },
    "vllm_omni.diffusion.forward_context": {
        "get_forward_context": "",
        "is_forward_context_available": "",
        "set_forward_context": (
            "vllm_config=, omni_diffusion_config=, attn_metadata=, paged_kv_runtime=, "
            "paged_kv_cached_prefix_len=, in_diffusion_kv_memory_profile=, "
            "split_text_embed_in_sp=, denoise_step_idx="
        ),
    },
    "vllm_omni.diffusion.hooks": {
        "HookRegistry": None,
        "HookRegistry.get_or_create": "cls, module",
    },
    "vllm_omni.diffusion.hooks.sequence_parallel": {
        "SequenceParallelSplitHook": None,
        "_get_submodule_by_name": "model, name",
        "apply_sequence_parallel": "module, config, plan",
    },
    "vllm_omni.diffusion.ipc": {
        "pack_diffusion_output_shm": "output, d2h_stream=",
        "unpack_diffusion_output_shm": "output",
    },
    "vllm_omni.diffusion.layers.rope": {
        "RotaryEmbedding": None,
    },
    "vllm_omni.diffusion.lora.manager": {
        "DiffusionLoRAManager": None,
    },
    "vllm_omni.diffusion.model_loader.diffusers_loader": {
        "DiffusersPipelineLoader": None,
        "DiffusersPipelineLoader.ComponentSource": None,
    },
    "vllm_omni.diffusion.models.flux": {
        "FluxTransformer2DModel": None,
    },
    "vllm_omni.diffusion.models.flux.pipeline_flux": {
        "FluxPipeline": None,
    },
    "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image": {
        "QwenImagePipeline": None,
    },
    "vllm_omni.diffusion.models.qwen_image.qwen_image_transformer": {
        "QwenImageTransformer2DModel": None,
    },
    "vllm_omni.diffusion.models.sd3.pipeline_sd3": {
        "StableDiffusion3Pipeline": None,
    },
    "vllm_omni.diffusion.models.sd3.sd3_transformer": {
        "SD3Transformer2DModel": None,
    },
    "vllm_omni.diffusion.models.t5_encoder": {
        "T5EncoderModel": None,
    },
    "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2": {
        "resolve_wan_flow_shift": "req, od_config",
        "resolve_wan_guidance_scales": "sampling_params, default_guidance_scale",
        "resolve_wan_sample_solver": "req, default=",
    },
    "vllm_omni.diffusion.registry": {
        "DiffusionModelRegistry": None,
        "DiffusionModelRegistry.models": None,
    },
    "vllm_omni.diffusion.request": {
        "OmniDiffusionRequest": None,
    },
    "vllm_omni.diffusion.sched": {
        "RequestScheduler": None,
    },
    "vllm_omni.diffusion.sched.interface": {
        "DiffusionRequestStatus": None,
        "DiffusionRequestStatus.FINISHED_ABORTED": None,
        "DiffusionRequestStatus.FINISHED_COMPLETED": None,
        "DiffusionRequestStatus.FINISHED_ERROR": None,
        "DiffusionRequestStatus.RUNNING": None,
        "SchedulerRequestState": None,
        "StepBatchSamplingParamsKey": None,
    },
    "vllm_omni.diffusion.utils.hf_utils": {
        "get_diffusion_model_index": "model_name, *, revision=",
    },
    "vllm_omni.diffusion.utils.tf_utils": {
        "get_transformer_config_kwargs": "tf_model_config, model_class=",
    },
    "vllm_omni.diffusion.worker.diffusion_model_runner": {
        "DiffusionModelRunner": None,
    },
    "vllm_omni.diffusion.worker.diffusion_worker": {
        "AsyncDiffusionOutput": None,
        "AsyncOutputKind": None,
        "AsyncOutputKind.OUTPUT_READY": None,
        "DiffusionWorker": None,
        "WorkerProc": None,
        "WorkerProc._async_output_loop": "self",
        "WorkerWrapperBase": None,
    },
    "vllm_omni.diffusion.worker.request_batch": {
        "DiffusionRequestBatch": None,
    },
    "vllm_omni.diffusion.worker.utils": {
        "RunnerOutput": None,
    },
    "vllm_omni.entrypoints.omni_base": {
        "omni_snapshot_download": "model_id",
    },
    "vllm_omni.entrypoints.openai.api_server": {
        "apply_stage_default_sampling_params": "default_params_json, sampling_params, stage_key",
    },
    "vllm_omni.errors": {
        "OmniClientError": None,
    },
    "vllm_omni.lora.utils": {
        "stable_lora_int_id": "lora_path",
    },
    "vllm_omni.platforms": {
        "current_omni_platform": None,
        "current_omni_platform.device_type": None,
        "current_omni_platform.empty_cache": "cls",
        "current_omni_platform.get_device_count": "cls",
        "current_omni_platform.is_available": "cls",
        "current_omni_platform.synchronize": "cls",
    },
    "vllm_omni.platforms.interface": {
        "OmniPlatform": None,
        "OmniPlatformEnum": None,
        "OmniPlatformEnum.OOT": None,
    },
    "vllm_omni.plugins": {
        "load_omni_general_plugins": "",
    },
}

#: Members of classes that gfdit derives from, with the parameters of methods that it overrides.
MEMBERS: Mapping[str, Mapping[str, str | None]] = {
    "vllm.model_executor.kernels.linear.scaled_mm.pytorch:TorchFP8ScaledMMLinearKernel": {
        "is_supported": "cls, compute_capability=",
    },
    "vllm.platforms.interface:Platform": {
        "check_if_supports_dtype": "cls, dtype",
        "device_control_env_var": None,
        "dispatch_key": None,
        "dist_backend": None,
        "get_current_memory_usage": "cls, device=",
        "get_device_capability": "cls, device_id=",
        "get_device_name": "cls, device_id=",
        "get_device_total_memory": "cls, device_id=",
        "get_device_uuid": "cls, device_id=",
        "is_pin_memory_available": "cls",
        "manual_seed_all": "cls, seed",
        "set_device": "cls, device",
        "simple_compile_backend": None,
    },
    "vllm_omni.diffusion.attention.backends.abstract:AttentionImpl": {
        "forward": "self, query, key, value, attn_metadata=",
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
            "self, od_config, scheduler=, kv_cache_config=, *, scheduler_block_size=, "
            "hash_block_size=, kv_vllm_config="
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
        "close": "self",
        "default_diffusion_model_runner_cls": None,
        "run_startup_warmup": "self",
    },
    "vllm_omni.diffusion.distributed.autoencoders.distributed_vae_executor:DistributedVaeExecutor": {
        "__init__": "self",
        "_balance_tasks": None,
        "execute": "self, z, operator, broadcast_result=",
    },
    "vllm_omni.diffusion.executor.abstract:DiffusionExecutor": {
        "__init__": "self, od_config",
        "_init_executor": "self",
        "check_health": "self",
        "collective_rpc": "self, method, timeout=, args=, kwargs=, unique_reply_rank=, exec_all_ranks=",
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
    "vllm_omni.diffusion.worker.diffusion_model_runner:DiffusionModelRunner": {
        "_refresh_cache_for_requests": None,
    },
    "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker": {
        "init_device": "self",
    },
    "vllm_omni.platforms.interface:OmniPlatform": {
        "get_default_stage_config_path": "cls",
        "get_diffusion_attn_backend_cls": "cls, selected_backend, head_size, allow_trtllm_default=",
        "get_diffusion_packed_modules_mapping": "cls, model_class",
        "supports_cpu_offload": "cls",
        "supports_torch_inductor": "cls",
    },
}
