"""What is there to check: devices, versions and tools, looked at in a process of its own.

The runner itself never touches a device: what it held would be missing to the parts, or be broken by one.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu.job import ROOT

_LOOK = """
import json, torch
found = torch.cuda.is_available()
print(json.dumps({
    "devices": torch.cuda.device_count() if found else 0,
    "name": torch.cuda.get_device_name() if found else "",
    "capability": list(torch.cuda.get_device_capability()) if found else [0, 0],
    "cuda": torch.version.cuda or "",
    "gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30) if found else 0,
}))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """``capability``: 90 means 9.0; 0 without a device. ``tools``: those of ``plan.NEEDS`` that are there."""

    num_devices: int
    device: str
    capability: int
    tools: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.device or "no GPU"


def look(environment: Mapping[str, str]) -> Machine:
    """Raises ValueError, in one clear line, where torch or a device is missing."""
    command = [sys.executable, "-c", _LOOK]
    done = subprocess.run(command, cwd=ROOT, env=dict(environment), capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"torch cannot be asked for its devices: {done.stderr.strip().splitlines()[-1]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    if not seen["devices"]:
        raise ValueError("torch sees no CUDA device; without one there is --interpret")
    major, minor = seen["capability"]
    text = f"{seen['devices']} x {seen['name']} ({major}.{minor}, {seen['gib']} GiB), CUDA {seen['cuda']}"
    tools = {"ncu": "ncu", "compute_sanitizer": "compute-sanitizer"}
    there = tuple(need for need, tool in tools.items() if shutil.which(tool, path=environment.get("PATH")))
    return Machine(seen["devices"], text, 10 * major + minor, there)


def versions() -> dict[str, str]:
    """Of what the check needs, and of what it can do without."""
    known = {}
    for name in ("torch", "triton", "numpy", "msgspec"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = "not installed"
    return known
