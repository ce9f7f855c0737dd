"""When the CPU platform is chosen, and what it stands in for."""

import subprocess
import sys
from pathlib import Path

import pytest

from gfdit.omni import plugin

PROBE = """
from vllm.platforms import current_platform
from vllm_omni.platforms import current_omni_platform
import torchvision, torchaudio
from torchaudio.functional import melscale_fbanks
platforms = (current_platform, current_omni_platform)
print(*(type(platform).__name__ for platform in platforms), current_omni_platform.dist_backend)
try:
    melscale_fbanks()
except NotImplementedError as error:
    print(error)
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A machine without devices; a test adds device nodes or `build:` tags to the set."""
    nodes: set[str] = set()
    monkeypatch.setattr(
        plugin, "_any_path", lambda folder, pattern: any(Path(n).match(f"{folder}/{pattern}") for n in nodes)
    )
    monkeypatch.setattr(plugin, "_nvml_device_count", lambda: 0)
    monkeypatch.setattr(plugin, "_distribution_version", lambda name: f"2.13.0+{'-'.join(nodes)}")
    return nodes


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ([], None),
        (["/dev/nvidia0"], "cuda"),
        (["/dev/nvidiactl"], None),
        (["/etc/nv_tegra_release"], "cuda"),
        (["/dev/kfd"], None),
        (["/dev/kfd", "rocm7"], "rocm"),
        (["/dev/dri/renderD128"], None),
        (["/dev/dri/renderD128", "xpu"], "xpu"),
        (["/dev/davinci3"], "npu"),
        (["/dev/mtgpu0"], "musa"),
    ],
)
def test_accelerator_is_found(machine: set[str], present: list[str], expected: str | None) -> None:
    machine.update(present)
    assert plugin.find_accelerator() == expected


def test_a_driver_that_reports_devices_is_an_accelerator(
    machine: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device nodes may be missing until the first use."""
    monkeypatch.setattr(plugin, "_nvml_device_count", lambda: 8)
    assert plugin.find_accelerator() == "cuda"


def test_nothing_happens_on_a_gpu_machine(machine: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("/dev/nvidia0")
    monkeypatch.setitem(sys.modules, "gfdit.omni.cpu_stubs", None)  # importing it would raise
    plugin.register()
    assert plugin.cpu_platform() is None and plugin.vllm_cpu_platform() is None


def test_a_cpu_build_of_vllm_keeps_its_own_platform(machine: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfdit.omni.cpu_stubs.install", lambda: None)
    monkeypatch.setattr(plugin, "_distribution_version", lambda name: "0.30.0+cpu")
    assert plugin.vllm_cpu_platform() is None
    assert plugin.cpu_platform() == plugin.OMNI_PLATFORM


@pytest.mark.thorough
@pytest.mark.skipif(plugin.find_accelerator() is not None, reason="the CPU platform is for machines without")
def test_vllm_and_omni_resolve_the_cpu_platform(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CpuDevicePlatform GfditCpuPlatform gloo" in done.stdout
    assert "torchaudio.functional.melscale_fbanks is not available" in done.stdout


def test_entry_points_import_nothing_heavy() -> None:
    code = "import sys, gfdit.omni.plugin; sys.exit(bool({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
