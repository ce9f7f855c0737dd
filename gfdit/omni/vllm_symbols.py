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
    "vllm.logger": {
        "init_logger": "name",
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
    },
    "vllm_omni.diffusion.diffusion_engine": {
        "DiffusionEngine": None,
        "DiffusionExecutionMode": None,
        "DiffusionExecutionMode.REQUEST_BATCH": None,
        "_RpcTask": None,
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
    "vllm_omni.diffusion.media": {
        "DiffusionMediaOutput": None,
        "VideoMediaOutput": None,
        "VideoTensorEncoding": None,
        "VideoTensorEncoding.NORMALIZED_FLOAT": None,
        "VideoTensorLayout": None,
        "VideoTensorLayout.BCTHW": None,
        "VideoTensorSpec": None,
        "VideoValueRange": None,
        "VideoValueRange.NEGATIVE_ONE_TO_ONE": None,
    },
    "vllm_omni.diffusion.models.helios.pipeline_helios": {
        "load_json_config": "model_path, subfolder, filename, local_files_only=",
    },
    "vllm_omni.diffusion.models.longcat_image.pipeline_longcat_image": {
        "calculate_shift": "image_seq_len, base_seq_len=, max_seq_len=, base_shift=, max_shift=",
        "retrieve_timesteps": "scheduler, num_inference_steps=, device=, timesteps=, sigmas=, **kwargs",
    },
    "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image": {
        "QwenImagePipeline": None,
        "QwenImagePipeline._build_denoise_kwargs": (
            "self, latents, timestep, guidance, prompt_embeds, prompt_embeds_mask, "
            "img_shapes, txt_seq_lens, do_true_cfg, negative_prompt_embeds, "
            "negative_prompt_embeds_mask, negative_txt_seq_lens, image_latents=, "
            "extra_transformer_kwargs="
        ),
        "QwenImagePipeline._decode_latents": "self, latents, height, width, output_type=",
    },
    "vllm_omni.diffusion.models.qwen_image.rope_utils": {
        "txt_seq_lens_from_embeds": "prompt_embeds",
    },
    "vllm_omni.diffusion.models.sdxl.sdxl_unet": {
        "SDXLUNet2DConditionModel": None,
        "SDXLUNet2DConditionModel.__init__": "self, *, od_config",
    },
    "vllm_omni.diffusion.models.wan2_2.chunked_mp4": {
        "resolve_wan_output_fps": "sampling_params",
        "resolve_wan_preencode_batch_frames": "sampling_params, *, default=",
        "resolve_wan_preencode_mp4": "sampling_params, *, output_type",
        "resolve_wan_video_codec_options": "sampling_params",
    },
    "vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2": {
        "FASTWAN_DMD_TIMESTEPS": None,
        "build_wan_scheduler": "sample_solver, flow_shift",
        "resolve_wan_flow_shift": "req, od_config",
        "resolve_wan_guidance_scales": "sampling_params, default_guidance_scale",
        "resolve_wan_sample_solver": "req, default=",
        "retrieve_latents": "encoder_output, generator=, sample_mode=",
    },
    "vllm_omni.diffusion.models.z_image.pipeline_z_image": {
        "calculate_shift": "image_seq_len, base_seq_len=, max_seq_len=, base_shift=, max_shift=",
        "retrieve_timesteps": "scheduler, num_inference_steps=, device=, timesteps=, sigmas=, **kwargs",
    },
    "vllm_omni.diffusion.models.z_image.z_image_transformer": {
        "SEQ_MULTI_OF": None,
    },
    "vllm_omni.diffusion.registry": {
        "_DIFFUSION_MODELS": None,
        "_DIFFUSION_POST_PROCESS_FUNCS": None,
        "register_diffusion_model": (
            "model_arch, module_name, class_name, pre_process_func_name=, "
            "post_process_func_name=, ir_op_priority_func_name=, "
            "action_post_process_func_name=, prefix_cache_func_name="
        ),
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
    "vllm_omni.diffusion.utils.chunked_video": {
        "decode_to_mp4": "vae, z, **session_kwargs",
    },
    "vllm_omni.diffusion.utils.hf_utils": {
        "get_diffusion_model_index": "model_name, *, revision=",
    },
    "vllm_omni.diffusion.utils.size_utils": {
        "normalize_min_aligned_size": "height, width, alignment",
    },
    "vllm_omni.diffusion.worker.diffusion_model_runner": {
        "DiffusionModelRunner": None,
    },
    "vllm_omni.diffusion.worker.diffusion_worker": {
        "DiffusionWorker": None,
        "WorkerWrapperBase": None,
    },
    "vllm_omni.diffusion.worker.input_batch": {
        "InputBatch": None,
        "InputBatch.make_batch": "cls, states, idx_mapping=, cached_batch=",
    },
    "vllm_omni.diffusion.worker.request_batch": {
        "DiffusionRequestBatch": None,
        "DiffusionRequestBatch.collate_prompt_field_map": "prompts, field_defaults, field_aliases=",
        "DiffusionRequestBatch.get_prompt_field": "prompt, name",
    },
    "vllm_omni.diffusion.worker.utils": {
        "RunnerOutput": None,
        "StepRequestState": None,
        "attach_stage_durations": "state, output",
        "clear_pipeline_stage_durations": "pipeline",
        "consume_pipeline_stage_durations": "pipeline",
        "merge_stage_durations": "state, stage_durations",
    },
    "vllm_omni.entrypoints.omni_base": {
        "omni_snapshot_download": "model_id",
    },
    "vllm_omni.errors": {
        "OmniClientError": None,
    },
    "vllm_omni.platforms": {
        "current_omni_platform": None,
        "current_omni_platform.device_type": None,
        "current_omni_platform.dist_backend": None,
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
        "close": None,
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
