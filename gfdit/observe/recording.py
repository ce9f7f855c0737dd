"""A recording: every event a control plane was given, when, and every command that followed.

JSON lines. The first one says how the control plane was made; then each event is followed by its commands. Text is
encoded the same way every time, so a repeated run is compared with a recording byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import msgspec

from gfdit.core import ControlPlane
from gfdit.core.commands import Command
from gfdit.core.cost.file import CostTable
from gfdit.core.events import Event

VERSION = 3
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}
_EVENT_START = b'{"now_s":'
_COMMAND_START = b'{"command":'


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane was made from. Without ``costs`` times are nominal."""

    version: int = VERSION
    model: str
    num_ranks: int
    policy: str
    policy_args: dict[str, str] = {}
    admission: str = "none"
    costs: CostTable | None = None
    max_artifact_bytes: int | None = None
    run_ahead: int = 0
    max_retries: int = 3
    checkpoint_every_steps: int = 0
    max_queue_s: float | None = None
    first_id: int = 0


class _Line(msgspec.Struct, frozen=True):
    data: msgspec.Raw
    now_s: float = 0.0
    event: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    event: Event
    now_s: float


@dataclass(slots=True)
class Step:
    """An event at ``line_number``, and its ``answer``: the lines up to the next event."""

    line_number: int
    given: TimedEvent
    answer: list[bytes] = field(default_factory=list)


class RecordingWriter:
    """Writes a recording, each line at once: one that ends early ends with the event that was fatal."""

    def __init__(self, path: str | Path, header: RecordingHeader) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._write([msgspec.json.encode(header)])

    def handle(self, plane: ControlPlane, event: Event, now_s: float) -> list[Command]:
        """``plane.handle(event, now_s)``, recorded. Raises what it raises."""
        self._write([msgspec.json.encode({"now_s": now_s, "event": type(event).__name__, "data": event})])
        try:
            commands = plane.handle(event, now_s)
        except ValueError as error:
            self._write([refusal_line(error)])
            raise
        self._write([command_line(command) for command in commands])
        return commands

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        self._file.write(b"".join(line + b"\n" for line in lines))
        self._file.flush()


def command_line(command: Command) -> bytes:
    return msgspec.json.encode({"command": type(command).__name__, "data": command})


def refusal_line(error: ValueError) -> bytes:
    return msgspec.json.encode({"refused": str(error)})


class RecordingReader:
    """Reads a recording, also one that is still being written.

    Raises ``ValueError`` naming file and line for what is no recording, or one of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = Path(path).open("rb")  # noqa: SIM115 (closed by close)
        self._line_number = 1
        try:
            self.header = msgspec.json.decode(self._file.readline(), type=RecordingHeader)
        except msgspec.MsgspecError as error:
            self.close()
            raise ValueError(f"{path}: not a recording: {error}") from error
        if self.header.version != VERSION:
            self.close()
            raise ValueError(f"{path}: a recording of version {self.header.version}, known: {VERSION}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def entries(self) -> Iterator[TimedEvent | Command]:
        """Events and commands from where the last call ended to the last line that is whole; no refusals."""
        for line in self._lines():
            if line.startswith((_EVENT_START, _COMMAND_START)):
                yield self._parse(line)

    def steps(self) -> Iterator[Step]:
        """Every event with the lines of its answer, of a recording that is complete."""
        step: Step | None = None
        for line in self._lines():
            if line.startswith(_EVENT_START):
                if step is not None:
                    yield step
                step = Step(self._line_number, self._parse(line))
            elif step is None:
                raise ValueError(f"{self._path}, line {self._line_number}: an event is expected")
            else:
                step.answer.append(line)
        if step is not None:
            yield step

    def _lines(self) -> Iterator[bytes]:
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)
                return
            self._line_number += 1
            yield line[:-1]

    def _parse(self, line: bytes) -> Any:
        """A :class:`TimedEvent` or a command."""
        try:
            parsed = msgspec.json.decode(line, type=_Line)
            kind = _EVENTS[parsed.event] if parsed.event else _COMMANDS[parsed.command]
            value = msgspec.json.decode(parsed.data, type=kind)
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f"{self._path}, line {self._line_number}: not an event: {error}") from error
        return TimedEvent(value, parsed.now_s) if parsed.event else value
