"""What gpu_check found, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gfdit.cli.provenance import source_lines

# Aims for kernels that share one GPU: small messages against the handshake, large ones against the device's copy.
AIM_SMALL, AIM_LARGE = 1.5, 0.8
SMALL_BYTES, LARGE_BYTES = 64 << 10, 4 << 20
# How often a path copies a byte that travels: into a slot or area and out of it, or straight.
COPIES = {"direct_pull": 1, "direct_push": 1}

Rows = Sequence[dict[str, Any]]


def markdown(report: dict[str, Any]) -> str:
    checks, rows = report["checks"], report["timings"]
    failed = [check for check in checks if not check["passed"]]
    lines = [
        f"# GPU check: {report['where']}",
        "",
        *([] if report["on_gpu"] else ["**Not on a GPU.** Kernels were interpreted; no time says anything.", ""]),
        f"- {len(checks) - len(failed)} of {len(checks)} checks passed",
        *(f"- {line}" for line in headlines(rows) if report["on_gpu"]),
        *source_lines(report, report["device"]),
        "",
        "| check | | s | |",
        "|---|---|---|---|",
        *(
            f"| {check['name']} | {'passed' if check['passed'] else 'FAILED'} | {check['seconds']:.1f} "
            f"| {check['detail']} |"
            for check in checks
        ),
    ]
    if rows:
        lines += ["", *table(rows)]
        lines += [
            "",
            "Times are of the slowest rank: median over the rounds, in brackets the smallest and the largest; on "
            "a GPU, of calls in a captured graph. Bytes are those between a pair of ranks. First the way taken "
            "without a measured table, then the fastest, if it is another one.",
        ]
    return "\n".join(lines) + "\n"


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
