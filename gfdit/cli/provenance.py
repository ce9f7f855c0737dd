"""Where a measurement comes from: commit, command, machine, versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "vllm-omni", "numpy")


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """What a report must say to be repeatable. ``argv`` is the script's, its path cut to two components."""
    script = "/".join(Path(argv[0]).parts[-2:])
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": commit(),
        "command": shlex.join(["python", script, *argv[1:]]),
        "machine": machine(),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def source_lines(report: dict[str, Any], *more: str) -> list[str]:
    """Markdown that says what :func:`provenance` found out; ``more`` goes behind the machine."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return [
        f"- Date: {report['date']}, commit {report['commit']}",
        f"- Command: `{report['command']}`",
        f"- Machine: {'; '.join([report['machine'], versions, *more])}",
    ]


def write_report(folder: Path, name: str, report: dict[str, Any], markdown: str) -> list[Path]:
    """Write a dated JSON file and its Markdown; ``report`` includes what :func:`provenance` returned."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}_{report['date'][:10]}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    paths[1].write_text(markdown)
    return paths


def machine() -> str:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_model()}, {cores} cores, {memory_bytes / 2**30:.0f} GiB, {platform.system()}"


def commit() -> str:
    """The checked-out commit, marked if files differ from it."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with uncommitted changes" if changed else head


def _git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *args], check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
