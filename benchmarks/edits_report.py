"""Edits under masks in the simulator, after figures of the FlashPS paper: loads, batching and placement.

Times are derived, not measured (``gfdit.sim.costs.flux_edits``): edits of 1024 x 1024 with FLUX.1-dev on H100, all
templates in the host's memory unless said otherwise. Every policy sees the same traces. What was tuned was tuned
on seeds 0 to 4. Run with ``python -m benchmarks.edits_report``; prints the page, or writes it with data and
picture to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.edits_page import markdown, plot
from gfdit.cli.provenance import provenance, write_report
from gfdit.core import Policy
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.load_plan import (
    best_plan,
    block_by_block_s,
    greedy_plan,
    leading_full_blocks,
    naive_s,
    steady_step_s,
)
from gfdit.core.cost.table import TableCostModel
from gfdit.core.tasks import TaskKind
from gfdit.policies.mask_aware import MaskAware
from gfdit.policies.triage import Triage
from gfdit.sim.costs import flux_costs
from gfdit.sim.costs.flux_edits import GAIN_OF_FOUR, GIB, NUM_STEPS, SIDE, UNMASKED_SHARE, edit_table, flux_edits
from gfdit.sim.edit_workloads import EDITS, EditTimes, generate_edits, template_names
from gfdit.sim.estimates import estimate
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import Simulator
from gfdit.sim.trace import TraceRequest

SEEDS = tuple(range(100, 110))
RATES = {GAIN_OF_FOUR: (0.25, 0.5), 1.0: (0.4,)}
"""Edits in a second for each rank, as in the paper; less where batches gain nothing, since 0.46 fill a rank."""
PLACED = (
    ("count", True),
    ("tokens", True),
    ("pipeline", True),
    ("triage", True),
    ("triage", False),
    ("triage-1", False),
)
"""Systems, and whether they are told deadlines; the first three do not look at them."""
ALL_TEMPLATES_GIB = 100_000.0  # of the host's memory: 970 templates of 75 GiB are 73,000
PROCESSING_S = 0.36  # FlashPS, section 6.4: before and behind each edit, on a CPU
MASK_RATIOS = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
METRICS = ("p95_s", "mean_s", "queueing_s", "attainment")


@dataclass(frozen=True)
class Point:
    """One simulation. ``per_s`` is the rate of edits for each rank.

    ``deadlines`` are those of the workload; without them a policy that goes by deadlines has none to go by.
    """

    section: str
    system: str
    per_s: float
    num_ranks: int
    num_requests: int
    workload: str = "edits-own"
    gain: float = GAIN_OF_FOUR
    host_gib: float = ALL_TEMPLATES_GIB
    deadlines: bool = False
    seed: int = 0


def policy_of(system: str) -> Policy:
    match system:
        case "triage":
            return Triage()
        case "triage-1":
            return Triage(patience=1.0)
        case "static":
            return MaskAware(batching="static")
        case "count" | "tokens":
            return MaskAware(placement="count" if system == "count" else "tokens")
    return MaskAware()


@cache
def table_of(gain: float, processing_s: float = 0.0) -> CostTable:
    """``processing_s`` is what a rank spends on images before and behind each edit, and runs nothing else."""
    table = edit_table(gain)
    entries = [
        replace(entry, seconds=entry.seconds + processing_s * (entry.task in (TaskKind.ENCODE, TaskKind.DECODE)))
        for entry in table.entries
    ]
    return replace(table, entries=tuple(entries))


@cache
def times_of(gain: float) -> EditTimes:
    return EditTimes(TableCostModel(table_of(gain)), flux_edits())


def trace_of(point: Point) -> list[TraceRequest]:
    trace = generate_edits(
        EDITS[point.workload],
        times_of(point.gain),
        num_ranks=point.num_ranks,
        seed=point.seed,
        per_min=60 * point.per_s * point.num_ranks,
        num_requests=point.num_requests,
    )
    return trace if point.deadlines else [replace(line, deadline_s=None) for line in trace]


def measured(point: Point) -> dict[str, float]:
    """Processing of images takes its time elsewhere in the section on batching, unless it is ``naive``."""
    in_place = point.system == "naive"
    apart_s = 2 * PROCESSING_S if point.section == "batching" and not in_place else 0.0
    edits = flux_edits(point.host_gib * GIB, template_names())
    table = table_of(point.gain, PROCESSING_S if in_place else 0.0)
    options = SimulationOptions(point.num_ranks, edits=edits)
    run = Simulator(policy_of(point.system), table, trace_of(point), options).run()
    assert not run.faults, run.faults[0]
    latencies_s = [one.latency_s + apart_s for one in run.requests if one.latency_s is not None]
    queueing_s = [one.start_s - one.trace.arrival_s for one in run.requests if one.start_s is not None]
    assert len(latencies_s) == len(queueing_s) == len(run.requests)
    return {
        "p95_s": float(np.percentile(latencies_s, 95)),
        "mean_s": fmean(latencies_s),
        "queueing_s": fmean(queueing_s),
        "attainment": 100 * fmean(one.met_deadline() for one in run.requests),
    }


def points(num_requests: int) -> list[Point]:
    """All but the seeds. One rank serves a third as many: it takes long enough for that."""
    few = max(20, num_requests // 3)
    made = [
        Point("queueing", system, rate, 1, few)
        for system, rate in product(("static", "pipeline"), (0.1, 0.2, 0.3, 0.4, 0.5))
    ]
    for gain, rates in RATES.items():
        made += [
            Point("batching", system, rate, 1, few, gain=gain)
            for system, rate in product(("static", "naive", "continuous", "triage"), rates)
        ]
        made += [
            Point("placement", system, rate, 8, num_requests, gain=gain, deadlines=deadlines)
            for rate in rates
            for system, deadlines in PLACED
        ]
    made += [
        Point("heavier", system, rate, 8, num_requests, name, deadlines=True)
        for name, rate in (("edits-public", 0.4), ("edits-try-on", 0.3))
        for system in ("pipeline", "triage")
    ]
    made += [
        Point("host", system, 0.25, 8, num_requests, host_gib=1024.0 * tib, deadlines=True)
        for system, tib in product(("pipeline", "triage"), (2, 32))
    ]
    return made


def fold(done: Iterable[tuple[Point, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Means over seeds, and halves of 95 % intervals; the values of each seed stay for differences."""
    groups: dict[Point, list[Mapping[str, float]]] = {}
    for point, result in done:
        groups.setdefault(replace(point, seed=0), []).append(result)
    rows = []
    for point, results in groups.items():
        row = {key: value for key, value in asdict(point).items() if key != "seed"}
        for metric in METRICS:
            values = [result[metric] for result in results]
            row[metric] = asdict(estimate(values)) | {"values": [round(value, 4) for value in values]}
        rows.append(row)
    return rows


def image_s(mask_ratio: float) -> dict[str, float]:
    """Seconds of all steps of an edit by what is loaded when (FlashPS, figures 4, 9 and 15)."""
    costs = flux_edits()
    cached_s, full_s, load_s = costs.block_s(mask_ratio)
    num = costs.num_blocks
    blocks = [cached_s] * num, [full_s] * num, [load_s] * num
    steady = num, cached_s, full_s, load_s, costs.num_buffers
    step_s = {
        "no cache": num * full_s,
        "naive loading": naive_s(blocks[0], blocks[2]),
        "block by block": block_by_block_s(blocks[0], blocks[2]),
        "Algorithm 1": greedy_plan(*blocks).seconds,
        "best of a step": best_plan(*blocks).seconds,
        "ours": steady_step_s(leading_full_blocks(*steady), *steady),
        "ideal": num * cached_s,
    }
    rest_s = UNMASKED_SHARE * flux_costs.step_s(SIDE, 1, 1)
    return {name: NUM_STEPS * (rest_s + seconds) for name, seconds in step_s.items()}


def report_of(num_requests: int, seeds: Sequence[int], num_jobs: int) -> dict[str, Any]:
    todo = [replace(point, seed=seed) for point in points(num_requests) for seed in seeds]
    if num_jobs > 1:
        with ProcessPoolExecutor(num_jobs) as pool:
            results = list(pool.map(measured, todo, chunksize=4))
    else:
        results = list(map(measured, todo))
    alone_s = {name: times_of(GAIN_OF_FOUR).mean_s(workload) for name, workload in EDITS.items()}
    return {
        "requests": num_requests,
        "seeds": list(seeds),
        "mean_alone_s": alone_s,
        "image_s": {f"{ratio:g}": image_s(ratio) for ratio in MASK_RATIOS},
        "rows": fold(zip(todo, results, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of a trace for 8 ranks; a third for one rank")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder to write to; otherwise the page is printed")
    args = parser.parse_args()
    report = provenance(sys.argv) | report_of(args.requests, SEEDS, args.jobs)
    if args.out is None:
        print(markdown(report))
        return
    paths = write_report(args.out, "edits", report, markdown(report))
    plot(report, paths[0].with_suffix(".png"))
    for path in (*paths, paths[0].with_suffix(".png")):
        print(path)


if __name__ == "__main__":
    main()
