"""vLLM's view of a machine without an accelerator: every rank is a process, every device is "cpu".

Written for the published wheels, which carry no compiled CPU operators. So the platform is out-of-tree rather
than vLLM's `cpu`: out-of-tree takes the native torch paths everywhere.
"""

import resource

import psutil
import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

MAX_CPU_RANKS = 64
"""How many ranks may share this machine: they are processes, the bound only catches a slip of the keyboard."""


class CpuDevicePlatform(Platform):
    """The device half, for vLLM's registry, resolved in the middle of `import vllm`: no vllm_omni here.

    vLLM answers None for any method a platform lacks, and the caller then fails with "'NoneType' object is
    not callable". So every method that vLLM-Omni's diffusion path calls is here, trivial or not.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # vLLM-Omni writes the devices of a stage here; one of our own, because CUDA_VISIBLE_DEVICES is not ours.
    device_control_env_var = "GFDIT_CPU_RANKS"
    # What vLLM compiles by itself, activations, would need a C++ compiler and take seconds in every process.
    simple_compile_backend = "eager"

    # Devices

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def get_device_count(cls) -> int:
        return MAX_CPU_RANKS

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"cpu-{device_id}"

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return None

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    # Streams: the CPU has none, so nothing is ever in flight

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def record_device_event(cls) -> None:
        return None

    # Memory: host memory stands in for device memory, the resident set for what an allocator reserved

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    @classmethod
    def memory_allocated(cls, device: torch.device | int | None = None) -> int:
        return int(psutil.Process().memory_info().rss)

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return cls.memory_allocated(device)

    @classmethod
    def max_memory_allocated(cls, device: torch.device | int | None = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @classmethod
    def max_memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return cls.max_memory_allocated(device)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        return float(cls.memory_allocated())

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | int | None = None) -> None:
        """Nothing: the kernel keeps one peak for the life of a process."""

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Torch computes every floating-point type on a CPU."""
