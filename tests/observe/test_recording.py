"""A recording that ends before its server does: at its limit, on a full disk, or anywhere in a line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gfdit.core import ControlPlane
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.observe import recording as module
from gfdit.observe.recording import RecordingHeader, RecordingReader, RecordingWriter
from gfdit.policies.fcfs import Fcfs
from gfdit.sim.replay import make_control_plane, replay
from tests.support.cluster import Cluster, Faults
from tests.support.workload import make_request

HEADER = RecordingHeader(model="m", num_ranks=4, policy="fcfs")


class Noting(ControlPlane):
    """Notes what it is told."""

    told: list[tuple[ev.Event, float]]

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        self.told.append((event, now_s))
        return super().handle(event, now_s)


@pytest.fixture(scope="module")
def told() -> list[tuple[ev.Event, float]]:
    """All that a control plane is told while it serves, lost ranks and an id that is taken included."""
    told: list[tuple[ev.Event, float]] = []
    plane = type("OfOneRun", (Noting,), {"told": told})
    cluster = Cluster(Fcfs(), 4, seed=3, faults=Faults(task=0.02, rank_lost=0.01), plane=plane)
    cluster.run([make_request(f"r{index}", num_steps=5) for index in range(8)])
    assert isinstance(told[0][0], ev.RequestArrived)
    return [told[0], *told]


def record(path: Path | str, told: list[tuple[ev.Event, float]], max_bytes: int = 1 << 30) -> list[cmd.Command]:
    """All commands that followed."""
    writer, plane = RecordingWriter(path, HEADER, max_bytes), make_control_plane(HEADER, {})
    commands = []
    for event, now_s in told:
        try:
            commands += writer.handle(plane, event, now_s)
        except ValueError as error:
            assert "already alive" in str(error)
    writer.close()
    return commands


def test_a_full_disk_ends_a_recording_and_nothing_else(
    told: list[tuple[ev.Event, float]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert record("/dev/full", told) == record(tmp_path / "whole", told) != []
    assert caplog.messages == ["recording /dev/full ends here: No space left on device; serving goes on"]
    done = replay(tmp_path / "whole")
    assert done.difference is None and done.num_events == len(told)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_recording_ends_at_its_limit_and_can_be_replayed(
    told: list[tuple[ev.Event, float]], tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    record(tmp_path / "whole", told)
    whole = (tmp_path / "whole").read_bytes()
    limit = int(share * len(whole))
    record(tmp_path / "limited", told, max_bytes=limit)
    assert (tmp_path / "limited").read_bytes() == whole[:limit]
    (message,) = caplog.messages
    assert message.endswith(f"limited ends here: it has reached its limit of {limit} bytes; serving goes on")
    done = replay(tmp_path / "limited")
    assert done.difference is None and 0 < done.num_events < len(told)


def test_a_recording_cut_off_anywhere_can_be_replayed(told: list[tuple[ev.Event, float]], tmp_path: Path) -> None:
    record(tmp_path / "whole", told)
    whole = (tmp_path / "whole").read_bytes()
    header_bytes = whole.index(b"\n") + 1
    draw = random.Random(1)
    ends_of_lines = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    sizes = [*draw.sample(ends_of_lines, 40), *(draw.randrange(header_bytes, len(whole)) for _ in range(40))]
    for size in sizes:
        (tmp_path / "cut").write_bytes(whole[:size])
        done = replay(tmp_path / "cut")
        assert done.difference is None, size
        assert done.num_events + done.num_commands == whole[:size].count(b"\n") - 1
    # A command that was never made is no cut.
    (tmp_path / "cut").write_bytes(whole + b'{"command":"CompleteRequest","data":{"request_id":"r0"}}\n')
    assert replay(tmp_path / "cut").difference is not None


def test_what_was_recorded_before_is_kept(told: list[tuple[ev.Event, float]], tmp_path: Path) -> None:
    for num_events in (10, 20):
        record(tmp_path / "r.jsonl", told[:num_events])
    assert [replay(tmp_path / name).num_events for name in ("r.jsonl", "r.jsonl.1")] == [20, 10]


def test_too_much_at_once_ends_a_recording_between_two_lines(
    told: list[tuple[ev.Event, float]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for a slow disk is bounded. This one has no time to write: all comes within one interval."""
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 2000)
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 600.0)
    record(tmp_path / "short", told)
    (message,) = caplog.messages
    assert message.endswith("short ends here: the disk is too slow; serving goes on")
    longest = max(map(len, (tmp_path / "short").read_bytes().splitlines()[1:]))
    assert (tmp_path / "short").stat().st_size < 1000 + 2000 + 20 * longest
    done = replay(tmp_path / "short")
    assert done.difference is None and 0 < done.num_events < len(told)


def test_an_event_that_is_fatal_is_the_last_of_its_recording(
    told: list[tuple[ev.Event, float]], tmp_path: Path
) -> None:
    class Breaks(ControlPlane):
        def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
            raise AssertionError("the books are wrong")

    writer = RecordingWriter(tmp_path / "r.jsonl", HEADER)
    with pytest.raises(AssertionError):
        writer.handle(Breaks(Fcfs(), [], make_control_plane(HEADER, {}).cost), *told[0])
    writer.close()
    with RecordingReader(tmp_path / "r.jsonl") as reader:
        (step,) = reader.steps()
    assert step.given.event == told[0][0] and not step.answer
