"""Engine, control process and workers, for real, log as the environment variables of vLLM say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gfdit.omni.plugin import find_accelerator
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="imports vLLM on the CPU platform")
ROOT = Path(__file__).resolve().parents[2]

# What of the server's first process matters here: vLLM's logger, gfdit under it, and the runtime that it starts.
ENGINE = """
import logging, os, signal, time
from gfdit.omni.plugin import prepare_cpu_process
prepare_cpu_process()
from gfdit.observe.logs import put_under_vllm
from gfdit.omni.vllm_logging import vllm_logging
from tests.runtime.test_runtime import Runtime

put_under_vllm()
logging.getLogger("gfdit.http").info("the engine's process is here")
runtime = Runtime(logging=vllm_logging())
runtime.wait_ready()
runtime.submit("bad", "sp1@0", "raise")
runtime.until_ended("bad")
os.kill(int(runtime.values("pid")[1]), signal.SIGKILL)
while not all(ok for ok, _ in runtime.call("pid").replies):
    time.sleep(0.1)  # rank 1 is away
runtime.close()
"""


def run(**environment: str) -> str:
    """Everything that the processes of a small server say."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        cwd=ROOT,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.thorough
def test_they_obey_vllm_logging_config_path(tmp_path: Path) -> None:
    """One that writes JSON lines to a file, and names vLLM's logger alone."""
    file, config = tmp_path / "log", tmp_path / "logging.json"
    line = '{"process": "%(processName)s", "logger": "%(name)s", "level": "%(levelname)s", "text": "%(message)s"}'
    config.write_text(
        json.dumps(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {"json": {"format": line}},
                "handlers": {"file": {"class": "logging.FileHandler", "filename": str(file), "formatter": "json"}},
                "loggers": {"vllm": {"handlers": ["file"], "level": "DEBUG", "propagate": False}},
            }
        )
    )
    elsewhere = run(VLLM_LOGGING_CONFIG_PATH=str(config))
    text = file.read_text()
    said = [json.loads(one) for one in text.splitlines() if one.startswith("{")]
    by_process = {one["process"]: "" for one in said}
    for one in said:
        by_process[one["process"]] += f"{one['level']} {one['text']}\n"
    assert "INFO the engine's process is here" in by_process["MainProcess"]
    assert "ERROR rank 1 is lost: its worker ended" in by_process["gfdit-control"]
    assert "INFO rank 1 is back" in by_process["gfdit-control"]
    assert "ERROR rank 0: bad/encode failed at sp1@0" in by_process["gfdit-rank0"]
    assert "ValueError: a bug" in text and "Traceback (most recent call last)" in text
    assert "rank 1 is lost" not in elsewhere and "bad/encode" not in elsewhere


@pytest.mark.thorough
def test_they_obey_vllm_logging_level() -> None:
    text = run(VLLM_LOGGING_LEVEL="ERROR", VLLM_LOGGING_PREFIX="<prefix> ")
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("(gfdit-control pid=") and " <prefix> ERROR " in line]
    assert [line for line in lines if line.startswith("(gfdit-rank0 pid=") and line.endswith("ValueError: a bug")]
    assert not [line for line in lines if " INFO " in line or " WARNING " in line]
