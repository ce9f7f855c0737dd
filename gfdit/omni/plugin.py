"""Entry points through which vLLM and vLLM-Omni find gfdit.

They run in every process of a server, before its heavy imports: this module stays on the standard library.
"""

import ctypes
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

VLLM_PLATFORM = "gfdit.omni.cpu_device.CpuDevicePlatform"
OMNI_PLATFORM = "gfdit.omni.cpu_platform.GfditCpuPlatform"


def register() -> None:
    """General plugin (`vllm.general_plugins` and `vllm_omni.general_plugins`).

    Installing the package alone must change nothing: gfdit acts only where `engine_backend` names it. The
    hook exists so that a process in which no platform was resolved yet still gets the CPU stand-ins.
    Called any number of times.
    """
    prepare_cpu_process()


def cpu_platform() -> str | None:
    """Platform plugin of vLLM-Omni, which has no CPU platform of its own."""
    return OMNI_PLATFORM if prepare_cpu_process() else None


def vllm_cpu_platform() -> str | None:
    """Platform plugin of vLLM. vLLM's CPU builds keep the CPU platform they bring."""
    return VLLM_PLATFORM if prepare_cpu_process() and not _vllm_has_cpu_platform() else None


def prepare_cpu_process() -> bool:
    """Make vllm_omni, transformers and diffusers importable where there is no accelerator.

    Returns whether this machine is such a machine; elsewhere it does nothing.
    """
    if find_accelerator() is not None:
        return False
    from gfdit.omni import cpu_stubs

    cpu_stubs.install()
    return True


def find_accelerator() -> str | None:
    """Name the accelerator of this machine, or None; asks drivers and device nodes, never a CUDA context.

    Errs towards an accelerator: serving on the CPU of a GPU machine would look like a very slow success,
    a missed CPU platform is a clear error at start.
    """
    torch_build = _distribution_version("torch")
    if (
        _any_path("/dev", "nvidia[0-9]*")
        or _any_path("/etc", "nv_tegra_release")
        or _any_path("/sys/class", "tegra-firmware")
        or _nvml_device_count() > 0
    ):
        return "cuda"
    # An AMD or Intel display adapter is no accelerator for a torch built without ROCm or XPU.
    if _any_path("/dev", "kfd") and ("rocm" in torch_build or importlib.util.find_spec("amdsmi") is not None):
        return "rocm"
    if _any_path("/dev/dri", "renderD*") and "xpu" in torch_build:
        return "xpu"
    if _any_path("/dev", "davinci[0-9]*"):
        return "npu"
    if _any_path("/dev", "mtgpu*"):
        return "musa"
    return None


def _any_path(folder: str, pattern: str) -> bool:
    return any(Path(folder).glob(pattern))


def _nvml_device_count() -> int:
    """Number of NVIDIA devices by the driver, which also creates missing device nodes; 0 without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value


def _vllm_has_cpu_platform() -> bool:
    """The test vLLM itself makes (`vllm.platforms.cpu_platform_plugin`)."""
    return sys.platform == "darwin" or "cpu" in _distribution_version("vllm")


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
