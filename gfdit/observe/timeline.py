"""The timeline: what ran where and when, as Chrome trace JSON that opens in Perfetto.

One track per rank, and one for a rank's migrations, which overlap its compute. The simulator and the server
write the same schema. One event a line: a file cut off by a killed process loses its last second, no more.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from gfdit.core.json_fields import one_line
from gfdit.core.layouts import ExecutionLayout
from gfdit.observe.writers import MAX_FILE_BYTES, AppendFile, BackgroundWriter, DirectWriter, Writer

VERSION = 1
MIGRATE = "migrate"
FLUSH_INTERVAL_S = 1.0
MAX_WAITING = 65536  # tasks on ranks, in about 50 MB
_US_PER_S = 1e6
_END = b"\n]\n"
_Microseconds = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]  # not infinite, and no number that is none
# Chrome's reserved colour names, the only ones a trace may ask for; chosen to be told apart.
_COLOURS = (
    "thread_state_running",
    "thread_state_iowait",
    "rail_response",
    "rail_animation",
    "detailed_memory_dump",
    "light_memory_dump",
    "vsync_highlight_color",
    "generic_work",
    "yellow",
    "olive",
    "cq_build_failed",
    "startup",
)


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one rank. Times are seconds from the timeline's start.

    A migration is a span too: ``kind`` is ``"migrate"``, ``task`` the artifact, ``ranks`` the sources and then
    the others that take part, ``sp`` and ``cfg`` 0.

    A server also says when the control plane ``decided`` to run the task, when the host had ``dispatched`` all of
    it to the device, and whether it was queued behind the task before it (``run_ahead``).
    """

    rank: int
    task: str
    request: str
    kind: str
    step: int
    sp: int
    cfg: int
    ranks: tuple[int, ...]
    start_s: float
    end_s: float
    decided_s: float | None = None
    dispatched_s: float | None = None
    run_ahead: bool = False

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class _Entry:
    """A span on the caller's clock, with whatever else its event should say."""

    span: Span
    extra: dict[str, Any]


class TimelineWriter:
    """Appends to a timeline file. ``record`` only queues.

    Times may be on any clock, as long as it is one clock: the file counts from ``base_s`` or, without it, from
    the earliest record that is written at first. ``close`` makes the file complete JSON; calling it twice is fine.

    As it is, it is for tools: a file that is there is replaced, and errors are raised. With ``serving`` a thread
    writes (:class:`~gfdit.observe.writers.BackgroundWriter`): neither an error nor a slow disk gets in the way. A
    file that has ``max_bytes`` is completed, and another one begun, whose times count from the same moment. Two
    older ones are kept, ``<name>.1`` and ``<name>.2``; what is there at the start is one of them.
    """

    def __init__(
        self,
        path: str | Path,
        num_ranks: int,
        *,
        base_s: float | None = None,
        serving: bool = False,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.path = Path(path)
        open_file = partial(_TimelineFile, self.path, num_ranks, base_s, max_bytes if serving else None)
        self._writer: Writer[_Entry]
        if serving:
            self._writer = BackgroundWriter(
                f"timeline {path}", open_file, max_waiting=MAX_WAITING, interval_s=FLUSH_INTERVAL_S
            )
        else:
            self._writer = DirectWriter(open_file())

    def record(
        self,
        rank: int,
        task_id: str,
        request_id: str,
        kind: str,
        step_index: int,
        layout: ExecutionLayout,
        start_s: float,
        end_s: float,
        *,
        decided_s: float | None = None,
        dispatched_s: float | None = None,
        run_ahead: bool = False,
        **extra: Any,
    ) -> None:
        """One task on one rank; call it for every rank of the layout. ``extra`` must be JSON."""
        parallel = layout.parallel
        span = Span(
            rank,
            task_id,
            request_id,
            str(kind),
            step_index,
            parallel.sp,
            parallel.cfg,
            layout.ranks,
            start_s,
            end_s,
            decided_s,
            dispatched_s,
            run_ahead,
        )
        self._writer.put(_Entry(span, extra))

    def record_migration(
        self,
        rank: int,
        artifact: str,
        request_id: str,
        ranks: tuple[int, ...],
        start_s: float,
        end_s: float,
        **extra: Any,
    ) -> None:
        """One artifact on its way, seen from ``rank``; ``ranks`` are the sources and then the others."""
        span = Span(rank, artifact, request_id, MIGRATE, -1, 0, 0, ranks, start_s, end_s)
        self._writer.put(_Entry(span, extra))

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _TimelineFile:
    """The file, and how entries are encoded. Without ``max_bytes`` it has no limit, and no older ones are kept."""

    def __init__(self, path: Path, num_ranks: int, base_s: float | None, max_bytes: int | None) -> None:
        self._path = path
        self._num_ranks = num_ranks
        self._base_s = base_s
        self._max_bytes = max_bytes
        self._open()

    def write(self, entries: Sequence[_Entry]) -> None:
        if self._base_s is None:
            self._base_s = min(entry.span.start_s for entry in entries)
        waiting = bytearray()
        for entry in entries:
            encoded = self._encode(entry, self._base_s)
            if not self._has_room(len(waiting) + len(encoded)):
                self._file.append(bytes(waiting))
                waiting.clear()
                self.close()
                self._open()
                encoded = self._encode(entry, self._base_s)  # with the names of its tracks
            waiting += encoded
            self._is_new = False
        self._file.append(bytes(waiting))

    def close(self) -> None:
        if not self._file.closed:
            self._file.append(_END)
            self._file.close()

    def _open(self) -> None:
        self._file = AppendFile(self._path, keeps_older=self._max_bytes is not None)
        self._migration_tracks: set[int] = set()
        self._is_new = True
        self._file.append(("[\n" + ",\n".join(_dump(event) for event in self._header())).encode())

    def _has_room(self, num_bytes: int) -> bool:
        """For so much more, and the end of the file."""
        if self._max_bytes is None or self._is_new:
            return True
        return self._file.num_bytes + num_bytes + len(_END) <= self._max_bytes

    def _encode(self, entry: _Entry, base_s: float) -> bytes:
        return "".join(f",\n{_dump(event)}" for event in self._events(entry, base_s)).encode()

    def _header(self) -> Iterable[dict[str, Any]]:
        yield _metadata("process_name", 0, name="gfdit")
        yield _metadata("gfdit_timeline", 0, version=VERSION, num_ranks=self._num_ranks)
        for rank in range(self._num_ranks):
            yield _metadata("thread_name", rank, name=f"rank {rank}")
            yield _metadata("thread_sort_index", rank, sort_index=2 * rank)

    def _events(self, entry: _Entry, base_s: float) -> Iterable[dict[str, Any]]:
        span = entry.span
        track = span.rank
        if span.kind == MIGRATE:
            track += self._num_ranks
            name = f"{span.request} migrate"
            if track not in self._migration_tracks:
                self._migration_tracks.add(track)
                yield _metadata("thread_name", track, name=f"rank {span.rank} migration")
                yield _metadata("thread_sort_index", track, sort_index=2 * span.rank + 1)
        else:
            name = _task_name(span)
        yield {
            "name": name,
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": track,
            "ts": round((span.start_s - base_s) * _US_PER_S, 3),
            "dur": round(span.duration_s * _US_PER_S, 3),
            "cname": _COLOURS[zlib.crc32(span.request.encode()) % len(_COLOURS)],
            "args": {
                **entry.extra,
                "request": span.request,
                "task": span.task,
                "kind": span.kind,
                "step": span.step,
                "sp": span.sp,
                "cfg": span.cfg,
                "rank": span.rank,
                "ranks": list(span.ranks),
                **_moments(span, base_s),
            },
        }


def read_timeline(path: str | Path) -> list[Span]:
    """The spans of a timeline by start time, migrations included; a cut-off file gives what it holds.

    Raises ``ValueError`` naming the file, and the line or number of an event that is none.
    """
    spans = []
    for where, event in _load_events(Path(path)):
        if not isinstance(event, dict):
            raise ValueError(f"{where}: not a trace event")
        if event.get("ph") == "X":
            try:
                spans.append(_span(msgspec.convert(event, _SpanEvent)))
            except (msgspec.ValidationError, UnicodeEncodeError) as error:
                raise ValueError(f"{where}: not a task or copy of gfdit: {one_line(error)}") from error
    return sorted(spans, key=lambda span: (span.start_s, span.rank))


def _load_events(path: Path) -> Iterator[tuple[str, Any]]:
    """Each with where it is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(events := json.loads(text), list):
            return ((f"{path}: event {number}", event) for number, event in enumerate(events))
    lines = text.split("\n")
    if lines[0].rstrip("\r") != "[":
        raise ValueError(f"{path} is not a gfdit timeline")
    return _events_of_lines(path, lines)


def _events_of_lines(path: Path, lines: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines[1:], start=2):
        try:
            event = json.loads(line.rstrip("\r").removesuffix(","))
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a trace event") from None
        else:
            yield f"{path}, line {number}", event


class _SpanArgs(msgspec.Struct, frozen=True):
    """What is written as ``args`` of a span's event."""

    rank: int
    task: str
    request: str
    kind: str
    step: int
    sp: int
    cfg: int
    ranks: tuple[int, ...]
    decided_us: _Microseconds | None = None
    dispatched_us: _Microseconds | None = None
    run_ahead: bool = False


class _SpanEvent(msgspec.Struct, frozen=True):
    args: _SpanArgs
    ts: _Microseconds
    dur: _Microseconds


def _span(event: _SpanEvent) -> Span:
    args = event.args
    start_s = event.ts / _US_PER_S
    return Span(
        rank=args.rank,
        task=args.task,
        request=args.request,
        kind=args.kind,
        step=args.step,
        sp=args.sp,
        cfg=args.cfg,
        ranks=args.ranks,
        start_s=start_s,
        end_s=start_s + event.dur / _US_PER_S,
        decided_s=None if args.decided_us is None else args.decided_us / _US_PER_S,
        dispatched_s=None if args.dispatched_us is None else args.dispatched_us / _US_PER_S,
        run_ahead=args.run_ahead,
    )


def _moments(span: Span, base_s: float) -> dict[str, Any]:
    """What is known of how the task came to run, on the clock of ``ts``."""
    times_s = {"decided_us": span.decided_s, "dispatched_us": span.dispatched_s}
    moments: dict[str, Any] = {
        name: round((at_s - base_s) * _US_PER_S, 3) for name, at_s in times_s.items() if at_s is not None
    }
    if span.run_ahead:
        moments["run_ahead"] = True
    return moments


def _task_name(span: Span) -> str:
    step = f" {span.step}" if span.kind == "denoise" else ""
    cfg = f" cfg{span.cfg}" if span.cfg > 1 else ""
    return f"{span.request} {span.kind}{step}{cfg} sp{span.sp}"


def _metadata(name: str, track: int, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": track, "args": args}


def _dump(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False)
