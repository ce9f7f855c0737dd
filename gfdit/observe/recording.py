"""A recording: every event a control plane was given, when, and every command that followed.

JSON lines. The first one says how the control plane was made; then each event is followed by its commands. Text is
encoded the same way every time, so a repeated run is compared with a recording byte for byte.

A replay starts where the server did. So a recording is not rotated: at its limit it ends, and what it holds up to
there can be replayed, as can what a killed server has left. How far that got within the last event is not known.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, get_args

import msgspec

from gfdit.core import ControlPlane
from gfdit.core.commands import Command
from gfdit.core.cost.file import CostTable
from gfdit.core.events import Event
from gfdit.core.json_fields import one_line
from gfdit.observe.writers import MAX_FILE_BYTES, AppendFile, BackgroundWriter

VERSION = 3
FLUSH_INTERVAL_S = 0.02
MAX_WAITING_BYTES = 32 << 20
MAX_RANKS = 10_000
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}
_EVENT_START = b'{"now_s":'
_COMMAND_START = b'{"command":'
_NOT_READABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane was made from. Without ``costs`` times are nominal.

    One that was switched on while requests ran begins in the midst of them: it can be read, but not replayed.
    """

    version: int = VERSION
    model: str
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    policy: str
    policy_args: dict[str, str] = {}
    admission: str = "none"
    costs: CostTable | None = None
    max_artifact_bytes: int | None = None
    device_memory_bytes: int | None = None
    run_ahead: int = 0
    max_retries: int = 3
    checkpoint_every_steps: int = 0
    max_queue_s: float | None = None
    first_id: int = 0
    skips_steps: bool = False
    drained: tuple[int, ...] = ()
    from_start: bool = True


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
    """An event at ``line_number``, and its ``answer``: the lines up to the next event.

    Of the ``last`` event of a recording the answer may be cut off, or lacking.
    """

    line_number: int
    given: TimedEvent
    answer: list[bytes] = field(default_factory=list)
    last: bool = False


class RecordingWriter:
    """Writes a recording from a thread, which neither an error nor a slow disk lets get in the way of serving.

    Where it cannot be written, or has ``max_bytes``, it ends, since with a gap it could not be replayed. Each line
    is on its way before the next is made: one that ends early ends with the event that was fatal, and that of a
    killed process lacks :data:`FLUSH_INTERVAL_S`. A recording that is there is kept as ``<name>.1``.
    """

    def __init__(self, path: str | Path, header: RecordingHeader, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._writer = BackgroundWriter(
            f"recording {path}",
            partial(_RecordingFile, Path(path), header, max_bytes),
            max_waiting=MAX_WAITING_BYTES,
            interval_s=FLUSH_INTERVAL_S,
            no_gaps=True,
        )

    def handle(self, plane: ControlPlane, event: Event, now_s: float) -> list[Command]:
        """``plane.handle(event, now_s)``, recorded. Raises what it raises."""
        if self._writer.ended:
            return plane.handle(event, now_s)
        self._write([msgspec.json.encode({"now_s": now_s, "event": type(event).__name__, "data": event})])
        try:
            commands = plane.handle(event, now_s)
        except ValueError as error:
            self._write([refusal_line(error)])
            raise
        self._write([command_line(command) for command in commands])
        return commands

    def close(self) -> None:
        self._writer.close()

    def _write(self, lines: list[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        self._writer.put(data, len(data))


class _RecordingFile:
    """The file, which is cut off at ``max_bytes``."""

    def __init__(self, path: Path, header: RecordingHeader, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._file = AppendFile(path, keeps_older=True)
        self._file.append(msgspec.json.encode(header) + b"\n")

    def write(self, lines: Sequence[bytes]) -> None:
        data = b"".join(lines)
        room = self._max_bytes - self._file.num_bytes
        self._file.append(data[: max(0, room)])
        if len(data) > room:
            self.close()
            raise OSError(errno.EFBIG, f"it has reached its limit of {self._max_bytes} bytes")

    def close(self) -> None:
        self._file.close()


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
        except _NOT_READABLE as error:
            self.close()
            raise ValueError(f"{path}: not a recording: {one_line(error)}") from error
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
        """Every event with the lines of its answer, of a recording that is not written to any more."""
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
            step.last = True
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
        except (*_NOT_READABLE, KeyError) as error:
            raise ValueError(f"{self._path}, line {self._line_number}: not an event: {one_line(error)}") from error
        return TimedEvent(value, parsed.now_s) if parsed.event else value
