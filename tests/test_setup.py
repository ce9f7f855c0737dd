"""The set-up script: what it refuses, and that an up-to-date environment costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup

ROOT = Path(__file__).resolve().parent.parent


def test_up_to_date_environment_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_pip", lambda *args: pytest.fail("pip was run"))
    fingerprint = setup._fingerprint(setup.find_accelerator())
    (tmp_path / setup.STAMP_NAME).write_text(fingerprint)
    assert setup.set_up(tmp_path) is False


def test_fingerprint_follows_the_machine() -> None:
    assert setup._fingerprint(None) != setup._fingerprint("cuda")


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        (["torch==2.13.0"], "vllm, vllm-omni 0.30.* (found: none)"),
        (["torch==2.13.0", "vllm==0.31.0", "vllm-omni==0.31.0"], "first, as your GPU needs it: vllm-omni 0.30"),
    ],
)
def test_gpu_machine_must_bring_its_own(visible: list[str], told: str) -> None:
    with pytest.raises(setup.SetupError) as caught:
        setup._check_host(visible)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_gpu_machine_with_everything_passes() -> None:
    setup._check_host(["torch==2.13.0", "vllm==0.30.1", "vllm-omni==0.30.0"])


@pytest.mark.thorough
def test_gpu_environment_sees_the_hosts_packages(tmp_path: Path) -> None:
    setup._create(tmp_path)
    hidden = subprocess.run([tmp_path / "bin" / "python", "-c", "import torch"], capture_output=True)
    assert hidden.returncode != 0  # negative control: a bare environment sees nothing
    setup._show_host_packages(tmp_path)
    code = "import torch; print(torch.__file__)"
    seen = subprocess.run([tmp_path / "bin" / "python", "-c", code], capture_output=True, text=True)
    host = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert seen.stdout == host.stdout != ""


def test_only_the_first_list_names_torch() -> None:
    """Every other list is installed without dependencies; a second torch would be a second download."""
    for path in (ROOT / "requirements").glob("*.txt"):
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in pins)
        assert any(line.startswith("torch==") for line in pins) == (path.name == "cpu-torch.txt")
