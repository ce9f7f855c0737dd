"""A rank of the real engine that is killed, or stops, in the middle of serving."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.elastic.recorded import recorded_from_now
from tests.support.images import Engine, ImageRequest
from tests.support.leftovers import command_line
from tests.support.waiting import wait_until


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)])
def test_images_are_those_of_an_undisturbed_server(
    engine: Engine, recording_path: Path, number: signal.Signals
) -> None:
    scripts = ("sp4@0,1,2,3", "sp1@2", "sp2@2,3 sp2@0,1", "sp1@1")
    requests = [ImageRequest(256, 256, steps=12, seed=7 + k).under(script) for k, script in enumerate(scripts)]
    expected = engine.images(requests)
    assert engine.call("tripwire_hits") == [[], [], [], []]
    pids = [described["pid"] for described in engine.call("gfdit_describe")]
    with recorded_from_now(recording_path) as recorded, ThreadPoolExecutor() as pool:
        answers = pool.submit(engine.images, requests)
        wait_until(lambda: min(recorded.num_steps(script) for script in scripts) > 2, "all requests run")
        assert not answers.done()
        os.kill(pids[2], number)
        images = answers.result()
    assert [image.tobytes() for image in images] == [image.tobytes() for image in expected]
    described = when_back(engine)
    again = [rank["pid"] for rank in described]
    engine.watch_workers()
    assert again[2] != pids[2] and [again[rank] for rank in (0, 1, 3)] == [pids[rank] for rank in (0, 1, 3)]
    assert not psutil.pid_exists(pids[2])
    assert next(iter(described[2]["warm_up_s"])) == "encode", "before it is used"
    assert not described[0]["warm_up_s"], "it was warmed up with the others"
    wide = ImageRequest(256, 256, steps=12, seed=7).under("sp4@3,2,1,0")
    assert engine.image(wide).tobytes() == expected[0].tobytes(), "the rank serves again"
    assert engine.drained()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)])
def test_a_lost_control_process_changes_no_image(
    engine: Engine, recording_path: Path, number: signal.Signals
) -> None:
    scripts = ("sp4@0,1,2,3", "sp1@2", "sp2@2,3 sp2@0,1", "sp1@1")
    requests = [ImageRequest(256, 256, steps=12, seed=7 + k).under(script) for k, script in enumerate(scripts)]
    expected = engine.images(requests)
    pids = [described["pid"] for described in engine.call("gfdit_describe")]
    with recorded_from_now(recording_path) as recorded, ThreadPoolExecutor() as pool:
        answers = pool.submit(engine.images, requests)
        wait_until(lambda: min(recorded.num_steps(script) for script in scripts) > 2, "all requests run")
        os.kill(control_process().pid, number)
        while not answers.done():
            assert engine.is_healthy()
        images = answers.result()
    assert [image.tobytes() for image in images] == [image.tobytes() for image in expected]
    assert [described["pid"] for described in engine.call("gfdit_describe")] == pids
    assert engine.drained()


def control_process() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if "gfdit.runtime.control_process" in command_line(child))


def when_back(engine: Engine) -> list[dict[str, Any]]:
    """What all ranks say of themselves."""

    def described() -> list[dict[str, Any]]:
        answer = engine.call("gfdit_describe")  # by rank, or what went wrong
        assert isinstance(answer, list) or re.search("lost|being started", str(answer))
        return answer if isinstance(answer, list) else []

    return wait_until(described, "the rank comes back")
