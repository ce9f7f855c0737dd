"""A part as it sees itself: its checks, its rows of figures, and where they are written as they come.

Every result is a line of JSON in a file that only grows. Whatever becomes of the process, what it has found is
there, and what it had begun. A part that is started again goes on behind what an earlier process began.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The process can go on no more, but another one may go on behind the check that it was at.
START_AGAIN = 75
# Before its limit a part ends by itself, to say where it stood.
_SPARE_S = 1.5


@dataclass(frozen=True, slots=True)
class Spec:
    """What a part is told. ``heap``: as of ``gfdit.comm.spawn``. ``found``: see ``plan.NEEDS``."""

    interpret: bool
    heap: str
    ranks: int
    limit_s: float
    results: str
    quick: bool = False
    rounds: int = 5
    sizes: tuple[int, ...] = ()
    capability: int = 0
    found: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        return cls(**fields | {name: tuple(fields[name]) for name in ("sizes", "found")})


class Job:
    """Of one process of a part."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._end = time.monotonic() + spec.limit_s
        self._begun = {entry["begin"] for entry in read_results(Path(spec.results)) if "begin" in entry}
        self._file = open(spec.results, "a")  # noqa: SIM115 - as long as the process
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        """Seconds until the part has to end."""
        return max(self._end - time.monotonic() - _SPARE_S, 0.0)

    def row(self, **fields: Any) -> None:
        """A figure with what it is of."""
        self._write({"row": fields})

    def note(self, text: str) -> None:
        """A sentence for the reader: what was found, or why something was not done."""
        self._write({"note": _line(text)})

    def check(self, name: str, call: Callable[[], str], limit_s: float | None = None) -> None:
        """Run ``call``, which says what it did or raises; not again what an earlier process of the part began.

        After ``limit_s`` without a result, or at the part's own limit, the process ends and says where it stood.
        It ends, too, if the device is broken afterwards: another one goes on behind this check.
        """
        if name in self._begun:
            return
        left_s = self.left_s
        is_own = limit_s is not None and limit_s < left_s
        limit_s = limit_s if limit_s is not None and is_own else left_s
        if limit_s <= 0:
            self._write({"left": name})
            return
        self._write({"begin": name})
        begin, passed, broken = time.monotonic(), True, ""
        with self._watched(name, limit_s, "" if is_own else " that were left to the part"):
            try:
                detail = call()
            except Exception as error:
                passed, detail = False, told(error)
                traceback.print_exc()
                broken = _device_error()
        self._done(name, passed, time.monotonic() - begin, detail)
        if broken:
            self.note(f"the device was unusable after {name} ({broken}): the rest ran in a new process")
            self._exit()

    def broken(self, error: BaseException) -> None:
        """The part itself has failed, outside of its checks."""
        self._done("the part itself", False, 0.0, told(error))

    @contextmanager
    def _watched(self, name: str, limit_s: float, which: str) -> Iterator[None]:
        thread = threading.get_ident()

        def give_up() -> None:
            place = _place_of(sys._current_frames().get(thread))
            faulthandler.dump_traceback(all_threads=True)
            self._done(name, False, limit_s, f"no result in the {limit_s:.1f} s{which}; it was at {place}")
            self._exit()

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _done(self, name: str, passed: bool, seconds: float, detail: str) -> None:
        detail = _line(detail)
        self._write({"check": {"name": name, "passed": passed, "seconds": round(seconds, 3), "detail": detail}})
        print(f"{'passed' if passed else 'FAILED'} {name}: {detail} ({seconds:.1f} s)", flush=True)

    def _exit(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(START_AGAIN)

    def _write(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()


def read_results(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may have been cut by the end of its process."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def told(error: BaseException) -> str:
    """What went wrong and where in this repository, in one line; also what was raised in another process."""
    place = _remote_place(error) or _place(error)
    return f"{type(error).__name__}: {error}" + (f" (at {place})" if place else "")


def _remote_place(error: BaseException) -> str:
    """A rank in another process sends its traceback along as a note."""
    for note in reversed(getattr(error, "__notes__", ())):
        for line in reversed(note.splitlines()):
            found = re.match(r'\s*File "(.+)", line (\d+), in (\S+)', line)
            if found and _is_ours(found[1]):
                return f"{_relative(found[1])}:{found[2]} in {found[3]}"
    return ""


def _place(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_ours(frame.filename):
            return f"{_relative(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def _place_of(frame: Any) -> str:
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_ours(filename: str) -> bool:
    return filename.startswith(str(ROOT)) and ".venv" not in filename


def _relative(filename: str) -> str:
    return filename.removeprefix(f"{ROOT}/")


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 600 else f"{text[:400]} ... {text[-180:]}"


def _device_error() -> str:
    """Why the device can be used no more by this process; "" if it can, or was not used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception as error:
        return _line(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return ""
