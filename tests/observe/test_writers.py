"""Diagnostic files: whatever becomes of them, who puts something in goes on at once and what waits is bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gfdit.observe import writers
from gfdit.observe.writers import AppendFile, BackgroundWriter

MINUTES_S = 300.0


class Disk:
    """A sink that holds up its writer until it is released."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.written: list[int] = []
        self.closed = False
        self.asked, self.released = threading.Event(), threading.Event()

    def write(self, items: Sequence[int]) -> None:
        self.asked.set()
        assert self.released.wait(MINUTES_S)
        if self.error:
            raise self.error
        self.written += items

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.released.set()


def start(open_sink: Callable[[], Disk], *, no_gaps: bool = False) -> BackgroundWriter[int]:
    return BackgroundWriter("timeline t.json", open_sink, max_waiting=10, interval_s=0.0, no_gaps=no_gaps)


def test_a_slow_disk_holds_nobody_up_and_what_waits_is_bounded(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    writer = start(lambda: disk)
    writer.put(0)
    assert disk.asked.wait(MINUTES_S)
    for number in range(1, 100):
        writer.put(number)
        assert writer.waiting <= 10
    assert writer.num_dropped == 90
    assert caplog.messages == ["timeline t.json: the disk is too slow, entries are left out; serving goes on"]
    disk.released.set()
    wait_until(lambda: writer.waiting == 0)
    writer.put(100)
    writer.close()
    assert disk.written == [*range(10), 100] and disk.closed
    assert caplog.messages[1:] == ["timeline t.json: 90 entries were left out"]


def test_what_must_have_no_gap_ends_where_the_first_would_be(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    writer = start(lambda: disk, no_gaps=True)
    for number in range(15):
        writer.put(number)
    assert writer.ended
    disk.released.set()
    wait_until(lambda: writer.waiting == 0)
    writer.put(100)
    writer.close()
    assert disk.written == [*range(10)] and disk.closed
    assert caplog.messages == ["timeline t.json ends here: the disk is too slow; serving goes on"]


def test_the_end_of_a_file_is_said_once(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.error = OSError(28, "No space left on device")
    writer = start(lambda: disk, no_gaps=True)
    for number in range(15):
        writer.put(number)
    disk.released.set()
    writer.close()
    assert caplog.messages == ["timeline t.json ends here: the disk is too slow; serving goes on"]


def test_sizes_count_and_one_item_may_be_larger_than_all_that_may_wait(disk: Disk) -> None:
    writer = start(lambda: disk)
    writer.put(0, size=1000)
    writer.put(1)
    assert (writer.waiting, writer.num_dropped) == (1000, 1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("not Unicode")])
def test_an_error_ends_the_file_and_nothing_else(
    disk: Disk, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    disk.error = error
    writer = start(lambda: disk)
    writer.put(0)
    assert disk.asked.wait(MINUTES_S)
    for number in range(1, 5):
        writer.put(number)
    disk.released.set()
    wait_until(lambda: writer.ended and not writer._queue)
    for number in range(100):
        writer.put(number)
    writer.close()
    said = "No space left on device" if isinstance(error, OSError) else "ValueError: not Unicode"
    assert caplog.messages == [f"timeline t.json ends here: {said}; serving goes on"]
    assert not writer._queue and not disk.written


def test_a_file_that_cannot_be_opened_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def open_sink() -> Disk:
        AppendFile(tmp_path, keeps_older=True)
        raise AssertionError("a folder was opened")

    writer = start(open_sink)
    assert writer.ended, "known at once: nothing is put in for nothing"
    writer.put(1)
    writer.close()
    assert caplog.messages == ["timeline t.json ends here: Is a directory; serving goes on"]


def test_a_disk_that_never_answers_delays_start_and_end_by_seconds(
    disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ``MINUTES_S``, and the test fail."""
    monkeypatch.setattr(writers, "OPEN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(writers, "CLOSE_TIMEOUT_S", 0.05)

    def open_sink() -> Disk:
        disk.write([])
        return disk

    writer = start(open_sink)
    writer.put(1)
    writer.close()
    writer.close()
    assert not disk.released.is_set() and not disk.written
    assert caplog.messages == ["timeline t.json: the disk does not answer, the end of it is lost"]


def test_a_file_is_closed_at_whatever_moment_it_is_asked_for(disk: Disk) -> None:
    """Between waking up and writing: what wakes the thread is cleared then."""
    disk.released.set()
    writer = start(lambda: disk)
    clear = writer._wake.clear

    def ask_and_clear() -> None:
        writer._closing.set()
        writer._wake.set()
        clear()

    writer._wake.clear = ask_and_clear  # type: ignore[method-assign]
    writer.put(1)
    writer._thread.join(60)
    assert disk.closed and disk.written == [1]


def test_the_last_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "t.json"
    for number in range(5):
        file = AppendFile(path, keeps_older=True)
        file.append(b"%d" % number)
        file.close()
    assert {file.name: file.read_text() for file in path.parent.iterdir()} == {
        "t.json": "4",
        "t.json.1": "3",
        "t.json.2": "2",
    }


def test_what_is_no_file_stays_where_it_is(tmp_path: Path) -> None:
    """/dev/stdout is a link: a server of root's could rename it."""
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    for name in ("link", "pipe"):
        file = AppendFile(tmp_path / name, keeps_older=True)
        file.append(b"after")
        file.close()
    assert os.read(reader, 100) == b"after"
    os.close(reader)
    assert (tmp_path / "target").read_text() == "after" and (tmp_path / "link").is_symlink()
    (tmp_path / "empty").touch()
    AppendFile(tmp_path / "empty", keeps_older=True).close()
    assert {path.name for path in tmp_path.iterdir()} == {"target", "link", "pipe", "empty"}


def wait_until(reached: Callable[[], bool]) -> None:
    again = threading.Event()
    for _ in range(int(MINUTES_S / 0.01)):
        if reached():
            return
        again.wait(0.01)
    raise AssertionError("never reached")
