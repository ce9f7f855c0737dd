"""Queued steps in real processes: taken back, failing, cancelled, and nothing left of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gfdit.core import events as ev
from gfdit.observe.recording import RecordingReader, TimedEvent
from gfdit.observe.timeline import read_timeline
from gfdit.sim.replay import replay
from tests.runtime.test_runtime import Runtime, assert_nothing_held

URGENT = """
from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec

class Urgent:
    '''One task at a time, on ranks 0 and 1 where it can; requests called u... first, then the oldest.'''

    name = "urgent"
    run_ahead = True

    def schedule(self, view):
        order = sorted(view.ready, key=lambda task: not task.request_id.startswith("u"))
        if not order or {0, 1} - set(view.free_ranks):
            return Decision()
        size = 2 if ParallelSpec(2) in order[0].candidates else 1
        return Decision((Dispatch((order[0].id,), ExecutionLayout((0, 1)[:size], ParallelSpec(size))),))
"""


class Recorded:
    """A runtime under that policy, and afterwards what it recorded."""

    def __init__(self, folder: Path) -> None:
        (folder / "urgent.py").write_text(URGENT)
        self.recording, self.timeline = folder / "recording.jsonl", folder / "timeline.json"
        self.runtime = Runtime(
            policy=f"{folder / 'urgent.py'}:Urgent",
            record_path=str(self.recording),
            timeline_path=str(self.timeline),
        )
        self.runtime.wait_ready()

    def assert_clean(self) -> None:
        assert_nothing_held(self.runtime)
        claims = Path(self.runtime.client.config.claims_dir)
        deadline_s = time.monotonic() + 5
        while list(claims.iterdir()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not list(claims.iterdir())

    def num_events(self, kind: type) -> int:
        with RecordingReader(self.recording) as reader:
            entries = [entry for entry in reader.entries() if isinstance(entry, TimedEvent)]
        return sum(isinstance(entry.event, kind) for entry in entries)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path_factory.mktemp("run-ahead"))
    yield recorded
    recorded.runtime.close()


def test_an_urgent_request_goes_before_a_step_that_was_queued(recorded: Recorded) -> None:
    """Arrivals at random moments of a step; whatever the ranks were about to begin, they agree on it."""
    draw = random.Random(3)
    recorded.runtime.submit("long", "", "0.01", num_steps=10_000)
    for index in range(25):
        time.sleep(draw.uniform(0, 0.03))  # where in a step it arrives is what is drawn
        recorded.runtime.submit(f"u{index}", "", "0.001", num_steps=2)
        (ended,) = recorded.runtime.until_ended(f"u{index}").values()
        assert ended.outcome == "completed"
    recorded.runtime.client.send(ev.RequestCancelled("long"))
    recorded.runtime.until_ended("long")
    recorded.assert_clean()
    assert recorded.num_events(ev.TaskWithdrawn) > 5


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_failed_step_takes_the_queued_one_along(recorded: Recorded, when: str) -> None:
    """``late``: rank 0 is through with the step and may have begun the next one when rank 1 fails."""
    names = [f"{when}-{step}-1-{index}" for index in range(4) for step in (0, 2)]
    for name in names:
        recorded.runtime.submit(name, "", "0.002", num_steps=5)
    recorded.runtime.submit("good", "", "0.002", num_steps=5)
    ended = recorded.runtime.until_ended("good", *names)
    assert ended["good"].outcome == "completed"
    assert {ended[name].outcome for name in names} == {"failed"}
    assert all("ValueError: a bug" in ended[name].error for name in names)
    recorded.assert_clean()


def test_requests_cancelled_at_random_leave_nothing(recorded: Recorded) -> None:
    draw = random.Random(11)
    names = [f"r{index}" for index in range(20)]
    for name in names:
        recorded.runtime.submit(name, "", "0.003", num_steps=8)
    for name in draw.sample(names, 10):
        time.sleep(draw.uniform(0, 0.02))
        recorded.runtime.client.send(ev.RequestCancelled(name))
    ended = recorded.runtime.until_ended(*names)
    assert {message.outcome for message in ended.values()} <= {"completed", "cancelled"}
    recorded.assert_clean()


def test_what_was_written_down(recorded: Recorded) -> None:
    recorded.runtime.submit("a", "", "0.03", num_steps=20)
    assert recorded.runtime.until_ended("a")["a"].outcome == "completed"
    recorded.assert_clean()
    recorded.runtime.close()
    assert replay(recorded.recording).difference is None
    steps = [span for span in read_timeline(recorded.timeline) if (span.request, span.kind) == ("a", "denoise")]
    assert sum(span.run_ahead for span in steps) > 20  # of 40: two ranks
    ends_s = {(span.rank, span.step): span.end_s for span in steps}
    for span in steps:
        assert span.decided_s is not None and span.dispatched_s is not None
        assert span.decided_s < span.start_s <= span.dispatched_s <= span.end_s + 1e-6  # they are rounded
        if span.run_ahead and span.step:
            assert span.decided_s < ends_s[span.rank, span.step - 1]
