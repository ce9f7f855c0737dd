"""A control process that is killed or stopped: another one goes on with the same workers and requests."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.observe.recording import RecordingReader, TimedEvent
from gfdit.observe.traces import TaskSpan
from tests.runtime.test_runtime import Runtime, assert_nothing_held
from tests.support.thorough import thorough

SCRIPTS = {
    "alone": "sp1@0",
    "pair": "prepare@1 sp2@0,1 sp2@1,2 sp3@2,0,1 decode@2",
    "wide": "prepare@1 sp3@0,1,2 cfg2@2,0 sp3@1,0,2",
}


class Lossy:
    """A runtime whose control process is lost now and then."""

    def __init__(self, folder: Path) -> None:
        self.recording = folder / "recording.jsonl"
        self.runtime = Runtime(control_timeout_s=3.0, record_path=str(self.recording), traces=True)
        self.runtime.wait_ready()
        self.pids = self.runtime.values("pid")

    def strike(self, number: signal.Signals) -> None:
        epoch = self.runtime.client.config.epoch
        os.kill(self.runtime.client.pid, number)
        ends = []
        while self.runtime.client.config.epoch == epoch:
            ends += self.runtime.client.receive(0.1)
        assert not any(isinstance(message, cmd.FailRequest) for message in ends)


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lossy]:
    lossy = Lossy(tmp_path_factory.mktemp("control-loss"))
    yield lossy
    lossy.runtime.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, *thorough([signal.SIGKILL])])
def test_requests_go_on_from_their_last_boundary(lossy: Lossy, number: signal.Signals) -> None:
    runtime = lossy.runtime
    names = {f"{name}-{number}": script for name, script in SCRIPTS.items()}
    for name, script in names.items():
        runtime.submit(name, script, payload="0.01", num_steps=30)
    runtime.until_running()
    lossy.strike(number)
    ended = runtime.until_ended(*names)
    assert {end.outcome for end in ended.values()} == {"completed"}, ended
    assert runtime.values("pid") == lossy.pids, "the workers are the same"
    told = {fact.request for fact in runtime.facts if isinstance(fact, TaskSpan) and fact.kind == "decode"}
    assert told >= names.keys(), "traces go on, too"
    assert_nothing_held(runtime)


def test_what_was_made_is_not_made_again(lossy: Lossy) -> None:
    """Of a request that runs on one rank, by what the second control process has sent."""
    runtime = lossy.runtime
    runtime.submit("long", "sp1@1", payload="0.02", num_steps=100)
    runtime.submit("signal", "sp1@0", payload="0.02", num_steps=20)
    while not any(isinstance(message, cmd.CompleteRequest) for message in runtime.client.receive(0.5)):
        pass  # "signal" is through: "long" is somewhere beyond its first steps
    lossy.strike(signal.SIGKILL)
    assert runtime.until_ended("long")["long"].outcome == "completed"
    with RecordingReader(lossy.recording) as reader:
        entries = list(reader.entries())
    assert isinstance(entries[0], TimedEvent) and isinstance(entries[0].event, ev.Reconnected)
    first = next(entry for entry in entries if isinstance(entry, cmd.RunTask))
    assert first.tasks[0].step_index > 5, first


def test_a_call_that_nobody_will_answer_is_answered(lossy: Lossy) -> None:
    os.kill(lossy.runtime.client.pid, signal.SIGSTOP)
    replies = lossy.runtime.call("pid").replies
    assert {ok for ok, _ in replies} == {False} and b"may be made again" in replies[0][1]
    assert lossy.runtime.values("pid") == lossy.pids


@pytest.mark.thorough
def test_again_and_again_at_random_moments(lossy: Lossy) -> None:
    draw, runtime = random.Random(5), lossy.runtime
    for index in range(6):
        names = [f"r{index}-{number}" for number in range(4)]
        for name in names:
            runtime.submit(
                name, draw.choice(list(SCRIPTS.values())), payload="0.005", num_steps=draw.randint(2, 20)
            )
        for _ in range(draw.randrange(20)):
            runtime.client.receive(0.005)
        before = runtime.client._alive.keys()
        lossy.strike(signal.SIGKILL)
        ended = runtime.until_ended(*before)
        assert {end.outcome for end in ended.values()} <= {"completed"}, ended
    assert_nothing_held(runtime)
