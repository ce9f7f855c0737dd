"""What gpu_check found, as JSON and Markdown, whole after every part."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gfdit.cli.provenance import source_lines

# Aims for kernels that share one GPU: small messages against the handshake, large ones against the device's copy.
AIM_SMALL, AIM_LARGE = 1.5, 0.8
SMALL_BYTES, LARGE_BYTES = 64 << 10, 4 << 20
# How often a path copies a byte that travels: into a slot or area and out of it, or straight.
COPIES = {"direct_pull": 1, "direct_push": 1}

Rows = Sequence[dict[str, Any]]


class ReportFiles:
    """A dated JSON file, its Markdown, and a log that parts write to. Readers find each of the first two whole."""

    def __init__(self, folder: Path, name: str, date: str) -> None:
        self.json, self.markdown, self.log = (
            folder / f"{name}_{date[:10]}{suffix}" for suffix in (".json", ".md", ".log")
        )
        self.log.write_text("")

    @property
    def paths(self) -> list[Path]:
        return [self.json, self.markdown, self.log]

    def write(self, report: dict[str, Any]) -> None:
        """JSON first, and whatever becomes of the Markdown: it only says the same in other words."""
        for path, to_text in ((self.json, _to_json), (self.markdown, markdown)):
            try:
                text = to_text(report)
            except Exception:
                if to_text is _to_json:
                    raise
                text = f"# No words for this report: see the JSON\n\n```\n{traceback.format_exc()}```\n"
            fresh = path.with_name(f".{path.name}.fresh")
            fresh.write_text(text)
            os.replace(fresh, path)


def _to_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def markdown(report: dict[str, Any]) -> str:
    parts = report["parts"]
    checks = [check for part in parts for check in part["checks"]]
    num_passed = sum(check["passed"] for check in checks)
    rows = _comparable([row for part in parts for row in part["rows"]])
    lines = [
        f"# GPU check: {report['where']}",
        "",
        *([] if report["on_gpu"] else ["**Not on a GPU.** Kernels were interpreted; no time says anything.", ""]),
        f"- {num_passed} of {len(checks)} checks passed, in {report['seconds']:.0f} of {report['budget_s']:.0f} s",
        *(f"- {line}" for line in headlines(rows) if report["on_gpu"]),
        *source_lines(report, report["device"]),
        "",
        "| part | | s | it tells |",
        "|---|---|---|---|",
        *(
            f"| {part['name']} | {_state(part)} | {part['seconds']:.0f} of {part['limit_s']:.0f} "
            f"| {part['tells']} |"
            for part in parts
        ),
    ]
    for part in parts:
        lines += _part(part, report["on_gpu"])
    return "\n".join(lines) + "\n"


def _state(part: dict[str, Any]) -> str:
    state = part["state"].upper() if part["state"] == "failed" else part["state"]
    return f"{state}: {_cell(part['reason'])}" if part["reason"] else state


def _part(part: dict[str, Any], on_gpu: bool) -> list[str]:
    if not part["checks"] and not part["rows"] and not part["notes"]:
        return []
    lines = ["", f"## {part['name'][0].upper()}{part['name'][1:]}", "", *(f"- {note}" for note in part["notes"])]
    if part["notes"]:
        lines.append("")
    if part["checks"]:
        lines += ["| check | | s | |", "|---|---|---|---|"]
        for check in part["checks"]:
            state = "passed" if check["passed"] else "FAILED"
            lines.append(f"| {check['name']} | {state} | {check['seconds']:.1f} | {_cell(check['detail'])} |")
    if part["rows"]:
        if not on_gpu:
            lines += ["", "Times only show that they are taken."]
        ours = _comparable(part["rows"])
        lines += ["", *table(ours), "", _OF_TABLE] if ours else []
        lines += _plain_tables([row for row in part["rows"] if row not in ours])
    return lines


def _comparable(rows: Rows) -> list[dict[str, Any]]:
    """Those of collectives by size."""
    return [row for row in rows if {"what", "ranks", "bytes", "us"} <= row.keys()]


_OF_TABLE = (
    "Times are of the slowest rank: median over the rounds, in brackets the smallest and the largest; on a GPU, "
    "of calls in a captured graph. Bytes are those between a pair of ranks. First the way taken without a "
    "measured table, then the fastest, if it is another one."
)


def _plain_tables(rows: Rows) -> list[str]:
    """A table for each set of columns."""
    lines: list[str] = []
    columns: tuple[str, ...] = ()
    for row in rows:
        if tuple(row) != columns:
            columns = tuple(row)
            lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines.append("| " + " | ".join(_cell(row[column]) for column in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|")


def table(rows: Rows) -> list[str]:
    """For each operation, group size and size: the way chosen by rule, and the fastest if it is another."""
    lines = ["| | ranks | bytes | us | way |", "|---|---|---|---|---|"]
    for cases in by_case(rows).values():
        fastest = min(cases, key=lambda row: row["us"])
        for row in dict.fromkeys((0, cases.index(fastest))):
            entry = cases[row]
            way = f"{entry['path']}, {entry['programs']} programs" if "path" in entry else ""
            note = " (by rule)" if row == 0 and way else " (fastest)" if way else ""
            lines.append(
                f"| {entry['what']} | {entry['ranks']} | {entry['bytes']} | {entry['us']:.1f} "
                f"({entry['min_us']:.1f} to {entry['max_us']:.1f}) | {way}{note} |"
            )
    return lines


def by_case(rows: Rows) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The rows of one operation, group size and size; the way chosen by rule comes first, as measured."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["what"], row["ranks"], row["bytes"]), []).append(row)
    return cases


def headlines(rows: Rows) -> list[str]:
    """The aims, for groups of all ranks, by the fastest way measured."""
    handshake = next((row for row in rows if row["what"] == "handshake"), None)
    if handshake is None:
        return []
    lines, ranks = [f"handshake of {handshake['ranks']} ranks: {handshake['us']:.2f} us"], handshake["ranks"]
    copies = {row["bytes"]: row["us"] for row in rows if row["what"] == "device copy"}
    for (what, size, num_bytes), cases in by_case(rows).items():
        if size != ranks or what not in ("barrier", "all_gather", "all_to_all"):
            continue
        best = min(cases, key=lambda row: row["us"])
        if num_bytes <= SMALL_BYTES:
            ratio = best["us"] / handshake["us"]
            lines.append(
                f"{what}, {num_bytes} bytes per pair: {best['us']:.2f} us by {best['path']}, {ratio:.2f} x the "
                f"handshake (aim {AIM_SMALL}: {'reached' if ratio <= AIM_SMALL else 'missed'})"
            )
        elif num_bytes >= LARGE_BYTES and num_bytes in copies:
            # Every part travels, and the own one is copied once.
            copied = num_bytes * ranks * ((ranks - 1) * COPIES.get(best["path"], 2) + 1)
            share = copied / best["us"] / (num_bytes / copies[num_bytes])
            lines.append(
                f"{what}, {num_bytes} bytes per pair: {best['us']:.1f} us by {best['path']}, {share:.0%} of the "
                f"device's copy rate (aim {AIM_LARGE:.0%}: {'reached' if share >= AIM_LARGE else 'missed'})"
            )
    return lines
