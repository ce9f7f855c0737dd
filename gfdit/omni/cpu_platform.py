"""vLLM-Omni's view of a machine without an accelerator."""

import shutil
from typing import Any

from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from gfdit.omni.cpu_device import CpuDevicePlatform


class GfditCpuPlatform(CpuDevicePlatform, OmniPlatform):
    """The CPU for vLLM-Omni, which ships no platform for it."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """It writes C++."""
        return shutil.which("g++") is not None

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def get_diffusion_packed_modules_mapping(cls, model_class: Any) -> dict[str, list[str]] | None:
        """What is asked before a model is made from quantised weights: the moment to have kernels for them."""
        from gfdit.omni import cpu_fp8

        cpu_fp8.install()
        return super().get_diffusion_packed_modules_mapping(model_class)

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() not in ("TORCH_SDPA", "SDPA"):
            raise ValueError(
                f"diffusion attention backend {selected_backend!r} does not run on a CPU; allowed: TORCH_SDPA"
            )
        return "gfdit.omni.cpu_attention.CpuSDPABackend"
