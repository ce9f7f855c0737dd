"""A recording: every event a control plane was given, when, and every command that followed.

JSON lines. The first one says how the control plane was made; then each event is followed by its commands. Text is
encoded the same way every time, so a repeated run is compared with a recording byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, get_args

import msgspec

from gfdit.core import ControlPlane
from gfdit.core.commands import Command
from gfdit.core.cost_file import CostTable
from gfdit.core.events import Event

VERSION = 1
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_EVENT_START = b'{"now_s":'


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the control plane was made from. Without ``costs`` times are nominal."""

    version: int = VERSION
    model: str
    num_ranks: int
    policy: str
    policy_args: dict[str, str] = {}
    costs: CostTable | None = None


class _EventLine(msgspec.Struct, frozen=True):
    now_s: float
    event: str
    data: msgspec.Raw


@dataclass(slots=True)
class Step:
    """An event at ``line_number``, and its ``answer``: the lines up to the next event."""

    line_number: int
    event: Event
    now_s: float
    answer: list[bytes] = field(default_factory=list)


class RecordingWriter:
    """Writes a recording. An event is written before it is handled: one that is fatal is the last line."""

    def __init__(self, path: str | Path, header: RecordingHeader) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._write(msgspec.json.encode(header))

    def handle(self, plane: ControlPlane, event: Event, now_s: float) -> list[Command]:
        """``plane.handle(event, now_s)``, recorded. Raises what it raises."""
        self._write(msgspec.json.encode({"now_s": now_s, "event": type(event).__name__, "data": event}))
        try:
            commands = plane.handle(event, now_s)
        except ValueError as error:
            self._write(refusal_line(error))
            raise
        for command in commands:
            self._write(command_line(command))
        return commands

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")


def command_line(command: Command) -> bytes:
    return msgspec.json.encode({"command": type(command).__name__, "data": command})


def refusal_line(error: ValueError) -> bytes:
    return msgspec.json.encode({"refused": str(error)})


def read_recording(path: str | Path) -> tuple[RecordingHeader, Iterator[Step]]:
    """Raises ``ValueError`` naming file and line for what is no recording, or one of another version."""
    file = Path(path).open("rb")  # noqa: SIM115 (read, and closed, by the iterator)
    try:
        header = msgspec.json.decode(file.readline(), type=RecordingHeader)
    except msgspec.MsgspecError as error:
        file.close()
        raise ValueError(f"{path}: not a recording: {error}") from error
    if header.version != VERSION:
        file.close()
        raise ValueError(f"{path}: a recording of version {header.version}, known: {VERSION}")
    return header, _steps(file, path)


def _steps(file: BinaryIO, path: str | Path) -> Iterator[Step]:
    step: Step | None = None
    with file:
        for number, line in enumerate(file, start=2):
            if line.startswith(_EVENT_START):
                if step is not None:
                    yield step
                step = _step(line, number, path)
            elif step is None:
                raise ValueError(f"{path}, line {number}: an event is expected")
            else:
                step.answer.append(line.removesuffix(b"\n"))
    if step is not None:
        yield step


def _step(line: bytes, number: int, path: str | Path) -> Step:
    try:
        parsed = msgspec.json.decode(line, type=_EventLine)
        return Step(number, msgspec.json.decode(parsed.data, type=_EVENTS[parsed.event]), parsed.now_s)
    except (msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"{path}, line {number}: not an event: {error}") from error
