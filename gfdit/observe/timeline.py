"""The timeline: what ran where and when, as Chrome trace JSON that opens in Perfetto.

One track per rank, and one for a rank's migrations, which overlap its compute. The simulator and the server
write the same schema. One event a line: a file cut off by a killed process loses its last second, no more.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfdit.core.layouts import ExecutionLayout

VERSION = 1
MIGRATE = "migrate"
FLUSH_INTERVAL_S = 1.0
_US_PER_S = 1e6
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
    """Appends to a timeline file. ``record`` only queues: a thread of the writer encodes and writes.

    Times may be on any clock, as long as it is one clock: the file counts from ``base_s`` or, without it, from
    the earliest record of the first second. ``close`` makes the file complete JSON; calling it twice is fine.
    """

    def __init__(self, path: str | Path, num_ranks: int, *, base_s: float | None = None) -> None:
        self.path = Path(path)
        self._num_ranks = num_ranks
        self._base_s = base_s
        self._queue: list[_Entry] = []
        self._lock = threading.Lock()
        self._migration_tracks: set[int] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write("[\n" + ",\n".join(_dump(event) for event in self._header()))
        self._file.flush()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_loop, name="gfdit-timeline", daemon=True)
        self._thread.start()

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
        self._queue.append(_Entry(span, extra))

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
        self._queue.append(_Entry(span, extra))

    def flush(self) -> None:
        """Write what has been recorded."""
        with self._lock:
            # Records may come in meanwhile: take exactly those that are there.
            entries = self._queue[: len(self._queue)]
            del self._queue[: len(entries)]
            if not entries or self._file.closed:
                return
            if self._base_s is None:
                self._base_s = min(entry.span.start_s for entry in entries)
            events = [event for entry in entries for event in self._events(entry, self._base_s)]
            self._file.write("".join(f",\n{_dump(event)}" for event in events))
            self._file.flush()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._lock:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> TimelineWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _flush_loop(self) -> None:
        while not self._closing.wait(FLUSH_INTERVAL_S):
            self.flush()

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
    """The spans of a timeline by start time, migrations included; a cut-off file gives what it holds."""
    spans = [_span(event) for event in _load_events(Path(path)) if event.get("ph") == "X"]
    return sorted(spans, key=lambda span: (span.start_s, span.rank))


def _load_events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    lines = text.splitlines()
    if not lines or lines[0] != "[":
        raise ValueError(f"{path} is not a gfdit timeline")
    events = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            events.append(json.loads(line.removesuffix(",")))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a trace event") from None
    return events


def _span(event: dict[str, Any]) -> Span:
    args = event["args"]
    start_s = event["ts"] / _US_PER_S
    return Span(
        rank=args["rank"],
        task=args["task"],
        request=args["request"],
        kind=args["kind"],
        step=args["step"],
        sp=args["sp"],
        cfg=args["cfg"],
        ranks=tuple(args["ranks"]),
        start_s=start_s,
        end_s=start_s + event["dur"] / _US_PER_S,
        decided_s=None if (us := args.get("decided_us")) is None else us / _US_PER_S,
        dispatched_s=None if (us := args.get("dispatched_us")) is None else us / _US_PER_S,
        run_ahead=args.get("run_ahead", False),
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
