"""Runs the parts one after the other, each in a process group of its own, and writes down what they find.

After every part the report is written whole. A part that hangs is ended at its limit; one that dies goes on in a
new process behind the check that it was at; a signal to the runner ends the part that runs, which is reported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import ROOT, START_AGAIN, Spec, read_results
from benchmarks.gpu.plan import Part, lacking, limit_s

# More time for a part to end by itself at its limit than it takes.
_GRACE_S = 1.0
# A part is not started again for less.
_LEAST_AGAIN_S = 4.0
_POLL_S = 0.02
_RAISED = 1

Result = dict[str, Any]


@dataclass(slots=True)
class Runner:
    """``changed``, given the results so far, writes the report. ``log`` gets what the parts print."""

    spec: Spec
    environment: Mapping[str, str]
    folder: Path
    log: Path
    changed: Callable[[Sequence[Result]], None]
    interrupted: int = 0

    def run(self, parts: Sequence[Part], end: float) -> list[Result]:
        """Results by part in their order; ``end``: of the time, on the monotonic clock."""
        results = [_result(part) for part in parts]
        wanted = [part for part in parts if not lacking(part, self.spec.interpret, self.spec.found)]
        for part, result in zip(parts, results, strict=True):
            if part not in wanted:
                _left_out(result, f"needs {lacking(part, self.spec.interpret, self.spec.found)}")
        self.changed(results)
        for part, result in zip(parts, results, strict=True):
            if part not in wanted:
                continue
            left_s = end - time.monotonic()
            limit = limit_s(part, wanted[wanted.index(part) + 1 :], left_s, self.spec.interpret)
            if self.interrupted:
                _left_out(result, f"interrupted by {signal.Signals(self.interrupted).name}")
            elif limit == 0.0:
                _left_out(result, f"budget: {max(left_s, 0):.0f} s were left, it needs {part.least_s:.0f}")
            else:
                result["state"] = "running"
                self.changed(results)
                self._run_part(part, result, limit)
            self.changed(results)
        return results

    def interrupt(self, number: int, _frame: object = None) -> None:
        """A signal handler: whatever runs is ended, and nothing more is begun."""
        self.interrupted = number

    def _run_part(self, part: Part, result: Result, limit: float) -> None:
        path = self.folder / f"{part.name.replace(' ', '_')}.jsonl"
        begin, num_entries = time.monotonic(), -1
        end, endings = begin + limit, []
        while True:
            spec = replace(self.spec, results=str(path), limit_s=end - time.monotonic())
            how = self._run_process(part, spec, end + _GRACE_S)
            entries = read_results(path)
            if ending := _close(path, entries, how, time.monotonic() - begin):
                endings.append(ending)
            has_moved = len(entries) > num_entries
            num_entries = len(entries)
            is_done = how in ("0", str(_RAISED)) or self.interrupted or not has_moved
            if is_done or end - time.monotonic() < _LEAST_AGAIN_S:
                break
        _take(result, read_results(path), "; ".join(endings), time.monotonic() - begin, limit)

    def _run_process(self, part: Part, spec: Spec, end: float) -> str:
        """How the process ended: its exit status, "-9" where it had to be killed at ``end``."""
        command = [sys.executable, "-m", "benchmarks.gpu.part", part.run, spec.to_json()]
        with open(self.log, "a") as log:
            log.write(f"==== {part.name}, at most {spec.limit_s:.0f} s\n")
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while not _has_ended(process.pid):
                if self.interrupted:
                    return f"interrupted by {signal.Signals(self.interrupted).name}"
                if time.monotonic() > end:
                    return "killed at its limit"
                time.sleep(_POLL_S)
        finally:
            # The number of its group is not given away before the process itself is waited for.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return str(process.returncode)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _close(path: Path, entries: Sequence[dict[str, Any]], how: str, seconds: float) -> str:
    """Write down what became of a check that was begun and not ended. Returns how a process ended, if not well."""
    if how in ("0", str(_RAISED), str(START_AGAIN)):
        return ""
    if how.lstrip("-").isdigit():
        how = f"died of {signal.Signals(-int(how)).name}" if int(how) < 0 else f"exited with status {how}"
    ended = {entry["check"]["name"] for entry in entries if "check" in entry}
    begun = [entry["begin"] for entry in entries if "begin" in entry and entry["begin"] not in ended]
    with path.open("a") as file:
        for name in begun:
            check = {"name": name, "passed": False, "seconds": round(seconds, 3), "detail": f"its process {how}"}
            file.write(f"\n{json.dumps({'check': check})}\n")
    return f"its process {how}" + (f" in {', '.join(begun)}" if begun else " outside of its checks")


def _result(part: Part) -> Result:
    return {
        "name": part.name,
        "tells": part.tells,
        "state": "waiting",
        "reason": "",
        "seconds": 0.0,
        "limit_s": 0.0,
        "checks": [],
        "rows": [],
        "notes": [],
    }


def _left_out(result: Result, reason: str) -> None:
    result |= {"state": "not run", "reason": reason}


def _take(result: Result, entries: Sequence[dict[str, Any]], ending: str, seconds: float, limit: float) -> None:
    for key, name in (("check", "checks"), ("row", "rows"), ("note", "notes")):
        result[name] = [entry[key] for entry in entries if key in entry]
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    reason = ending or (f"failed: {', '.join(failed)}" if failed else "")
    left = [entry["left"] for entry in entries if "left" in entry]
    if not result["checks"] and not left and not reason:
        reason = "it checked nothing"
    state = "failed" if reason else "passed" if result["checks"] else "not run"
    if left:
        reason = "; ".join([*([reason] if reason else []), f"budget: no time was left for {', '.join(left)}"])
    result |= {
        "state": state,
        "reason": reason,
        "seconds": round(seconds, 1),
        "limit_s": round(limit, 1),
    }
