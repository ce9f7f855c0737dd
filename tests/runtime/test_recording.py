"""The control process's decisions repeat, byte for byte, from a recording of its events."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gfdit.core import events as ev
from gfdit.observe.recording import RecordingReader
from gfdit.sim.costs.published_costs import qwen_image_h20
from gfdit.sim.replay import main, replay
from tests.runtime.test_runtime import Runtime
from tests.support.thorough import thorough

NUM_REQUESTS = 12


@pytest.fixture(scope="module", params=[*thorough(["nominal costs"]), "cost table"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a runtime with three ranks under traffic, with failures, a cancelled request and a repeated id."""
    folder = tmp_path_factory.mktemp("recording")
    costs = None
    if request.param == "cost table":
        costs = str(folder / "costs.json")
        qwen_image_h20().save(costs)
    path = folder / "recording.jsonl"
    config: dict[str, Any] = {"record_path": str(path), "costs_path": costs, "policy_args": {"group_size": "1"}}
    runtime = Runtime(policy="fcfs", model="qwen-image", **config)
    runtime.wait_ready()
    runtime.submit("long", "", num_steps=500)
    runtime.submit("long", "")
    assert runtime.until_ended("long")["long"].outcome == "failed"
    draw = random.Random(7)
    names = [f"r{index}" for index in range(NUM_REQUESTS)]
    for name in names:
        runtime.submit(name, "", "raise" if name == "r3" else "0.002", num_steps=draw.randint(1, 6))
    runtime.until_ended(*names)
    runtime.client.send(ev.RequestCancelled("long"))
    runtime.until_ended("long")
    runtime.close()
    yield path


def test_decisions_repeat_byte_for_byte(recording: Path) -> None:
    done = replay(recording)
    assert done.difference is None
    lines = recording.read_bytes().splitlines()
    assert done.num_events + done.num_commands == len(lines) - 1
    assert done.num_events > NUM_REQUESTS * 5
    for name in (b"RunTask", b"FailRequest", b"CancelRequest", b"refused", b"CompleteRequest"):
        assert any(name in line[:40] for line in lines), f"the traffic has no {name.decode()}"


def test_another_policy_argument_is_noticed(recording: Path) -> None:
    difference = replay(recording, {"group_size": "2"}).difference
    assert difference is not None
    assert "RunTask" in difference.recorded + difference.replayed


@pytest.mark.parametrize("event", ["RequestArrived", "TaskFinished", "RequestCancelled"])
def test_a_dropped_event_is_noticed(recording: Path, tmp_path: Path, event: str) -> None:
    with RecordingReader(recording) as reader:
        dropped = next(step for step in reader.steps() if type(step.given.event).__name__ == event)
    lines = recording.read_bytes().splitlines(keepends=True)
    first = dropped.line_number - 1
    del lines[first : first + 1 + len(dropped.answer)]
    (tmp_path / "cut").write_bytes(b"".join(lines))
    assert replay(tmp_path / "cut").difference is not None


def test_a_changed_byte_is_noticed(recording: Path, tmp_path: Path) -> None:
    lines = recording.read_bytes().splitlines(keepends=True)
    index = max(i for i, line in enumerate(lines) if line.startswith(b'{"command":"RunTask"'))
    lines[index] = lines[index].replace(b'"dispatch_id":', b'"dispatch_id":1', 1)
    (tmp_path / "changed").write_bytes(b"".join(lines))
    difference = replay(tmp_path / "changed").difference
    assert difference is not None and difference.line_number == index + 1


def test_command(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording)]) == 0
    assert "all as recorded" in capsys.readouterr().out
    (tmp_path / "no-recording").write_text("{}\n")
    assert main([str(tmp_path / "no-recording")]) == 2
    assert "no-recording: not a recording" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2
    header, _, _ = recording.read_bytes().partition(b"\n")
    (tmp_path / "junk").write_bytes(header + b'\n{"now_s":1.0,"event":"Nonsense","data":{}}\n')
    assert main([str(tmp_path / "junk")]) == 2
    assert "line 2: not an event" in capsys.readouterr().err


def test_a_full_disk_does_not_end_serving(capfd: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime(policy="fcfs", record_path="/dev/full", timeline_path="/dev/full")
    serve_two(runtime)
    said = capfd.readouterr().err
    for name in ("recording", "timeline"):
        assert said.count(f"{name} /dev/full ends here: No space left on device; serving goes on") == 1


@pytest.mark.thorough
def test_a_disk_that_stops_answering_holds_up_nothing_but_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads takes so much and then nothing any more."""
    for name in ("recording", "timeline"):
        os.mkfifo(tmp_path / name)
    pipes = [os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK) for name in ("recording", "timeline")]
    for pipe in pipes:
        fill(pipe)
    recording, timeline = str(tmp_path / "recording"), str(tmp_path / "timeline")
    serve_two(Runtime(policy="fcfs", record_path=recording, timeline_path=timeline))
    said = capfd.readouterr().err
    for name in ("recording", "timeline"):
        assert f"{name} {tmp_path / name}: the disk does not answer, the end of it is lost" in said
    for pipe in pipes:
        os.close(pipe)


def fill(pipe: int) -> None:
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))


def serve_two(runtime: Runtime) -> None:
    runtime.wait_ready()
    runtime.submit("a", "", num_steps=20)
    runtime.submit("b", "", num_steps=20)
    ended = runtime.until_ended("a", "b", timeout_s=300)
    assert [message.outcome for message in ended.values()] == ["completed"] * 2
    runtime.close()
