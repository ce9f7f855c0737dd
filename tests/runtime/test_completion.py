"""Dispatch and device completion are different events: with a device that works when it is told to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from gfdit.runtime.completion import CompletionMonitor, DeviceMonitor, HostMonitor

PATIENCE_S = 10.0


@dataclass
class FakeDevice:
    """Comes to the next mark in its stream with every ``advance``; a mark's time is its number."""

    marks: list[FakeMark] = field(default_factory=list)
    num_passed: int = 0

    def make(self) -> FakeMark:
        self.marks.append(FakeMark(float(len(self.marks))))
        return self.marks[-1]

    def advance(self) -> None:
        self.marks[self.num_passed].passed.set()
        self.num_passed += 1


@dataclass
class FakeMark:
    at_s: float
    passed: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> float:
        assert self.passed.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self.at_s


@dataclass
class Log:
    """What the works were told, by which thread, in order."""

    told: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, what: str) -> None:
        with self.changed:
            self.told.append(what)
            self.threads.append(threading.current_thread().name)
            self.changed.notify_all()

    def wait_for(self, what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what in self.told, PATIENCE_S), f"{what} is not in {self.told}"


@dataclass
class LoggedWork:
    name: str
    log: Log
    times_s: dict[str, float] = field(default_factory=dict)

    def started(self, at_s: float) -> None:
        self._note("started", at_s)

    def dispatched(self, at_s: float) -> None:
        self._note("dispatched", at_s)

    def finished(self, at_s: float) -> None:
        self._note("finished", at_s)

    def broke(self, error: Exception) -> None:
        self.log.add(f"{self.name} broke: {error}")

    def _note(self, what: str, at_s: float) -> None:
        self.times_s[what] = at_s
        self.log.add(f"{self.name} {what}")


def launch(monitor: CompletionMonitor, work: LoggedWork) -> None:
    monitor.begin(work)
    work.log.add(f"{work.name} launched")
    monitor.end(work)


def test_two_tasks_are_in_flight_and_the_lane_waits_for_neither() -> None:
    device, log = FakeDevice(), Log()
    monitor = DeviceMonitor(device.make)
    first, second = LoggedWork("first", log), LoggedWork("second", log)
    launch(monitor, first)
    launch(monitor, second)
    assert log.told == ["first launched", "first dispatched", "second launched", "second dispatched"]
    assert set(log.threads) == {threading.current_thread().name}
    for step in ("first started", "first finished", "second started", "second finished"):
        assert step not in log.told
        device.advance()
        log.wait_for(step)
    monitor.close()
    assert log.threads[4:] == ["gfdit-monitor"] * 4
    assert [first.times_s["started"], first.times_s["finished"]] == [0.0, 1.0]
    assert [second.times_s["started"], second.times_s["finished"]] == [2.0, 3.0]


def test_drain_waits_for_all_that_was_launched() -> None:
    device, log = FakeDevice(), Log()
    monitor = DeviceMonitor(device.make)
    launch(monitor, LoggedWork("first", log))
    drained = threading.Event()

    def drain() -> None:
        monitor.drain()
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    device.advance()
    log.wait_for("first started")
    assert not drained.is_set()
    device.advance()
    thread.join(PATIENCE_S)
    assert drained.is_set() and log.told[-1] == "first finished"
    monitor.close()


def test_a_device_that_fails_fails_the_work_and_the_monitor_goes_on() -> None:
    device, log = FakeDevice(), Log()
    monitor = DeviceMonitor(device.make)
    launch(monitor, LoggedWork("first", log))
    launch(monitor, LoggedWork("second", log))
    device.marks[1].error = RuntimeError("unspecified launch failure")
    for _ in range(4):
        device.advance()
    monitor.close()
    assert log.told[4:] == [
        "first started",
        "first broke: unspecified launch failure",
        "second started",
        "second finished",
    ]


def test_work_ends_once_it_has_begun() -> None:
    device, log = FakeDevice(), Log()
    monitor = DeviceMonitor(device.make)
    with pytest.raises(AssertionError, match="has not begun"):
        monitor.end(LoggedWork("first", log))
    monitor.close()


def test_on_the_host_launched_is_done() -> None:
    log = Log()
    work = LoggedWork("first", log)
    launch(HostMonitor(), work)
    assert log.told == ["first started", "first launched", "first dispatched", "first finished"]
    assert work.times_s["started"] <= work.times_s["dispatched"] == work.times_s["finished"]
