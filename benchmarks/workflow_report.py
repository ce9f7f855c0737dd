"""Workflows of the LegoDiffusion paper (Figures 4, 9 and 10) in the simulator: components against pipelines.

A pool of components under ``lego`` and under ``triage``, against pipelines that are bound to ranks of their own,
and pipelines that are swapped in as a whole; all with the same admission. Run with
``python -m benchmarks.workflow_report``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gfdit.core import Policy, Request, Task, TaskGraph, TaskKind
from gfdit.core.components import Component
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.core.policy.admission import with_admission
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage
from gfdit.sim.simulator import SimulationOptions, SimulationRun, Simulator
from gfdit.sim.workflow_costs import GIB, LOAD_BYTES_PER_S, SHAPE
from gfdit.sim.workflow_mixes import SETTINGS, WorkflowMix, paper_setting

RANK_BYTES = 72 * GIB
SYSTEMS = ("lego", "triage", "static", "swap")
SEEDS = (11, 12, 13)


def simulate(
    system: str, setting: str, num_ranks: int, load: float, seed: int, num_requests: int, **options: Any
) -> SimulationRun:
    """``load`` is a share of the capacity of all ranks; ``admission`` False turns it off."""
    mix = paper_setting(setting)
    admission = options.pop("admission", True)
    lines = mix.trace(num_requests, load=load, num_ranks=num_ranks, seed=seed, **options)
    pool = system in ("lego", "triage")
    policy: Policy = Triage() if system == "triage" else Lego(batching=pool, adaptive=pool)
    if admission:
        policy = with_admission(policy, "deadline")
    components = mix.components if pool else pipelines_of(mix, num_ranks if system == "static" else None)
    run = SimulationOptions(
        num_ranks,
        dispatch_latency_s=2e-4,
        components=components,
        component_bytes=None if system == "static" else RANK_BYTES,
    )
    build = mix.graphs(num_ranks) if pool else monolithic_graph
    costs = mix.costs if pool else whole_costs(mix)
    return Simulator(policy, costs, lines, run, build).run()


def monolithic_graph(request: Request) -> TaskGraph:
    """All of a request as one task of a pipeline that is loaded as a whole."""
    task = Task(f"{request.id}/all", request.id, TaskKind.REQUEST, 0, (), (), component=request.model)
    return TaskGraph(request.id, (task,))


def whole_costs(mix: WorkflowMix) -> CostTable:
    """Of each workflow as one task, one part after the other on one rank."""
    size = SHAPE.height, SHAPE.width, 1
    entries = [
        CostEntry(name, TaskKind.REQUEST, *size, variant.base.guided, 1, 1, 1, mix.alone_s(name))
        for name, variant in mix.variants.items()
    ]
    return replace(mix.costs, entries=tuple(entries), artifacts=())


def pipelines_of(mix: WorkflowMix, num_ranks: int | None = None) -> tuple[Component, ...]:
    """Whole pipelines as components that share nothing.

    With ``num_ranks`` each is bound to ranks of its own, as many as its share of the work asks for, and at least
    one; where there are fewer ranks than workflows some have the same rank.
    """
    made = []
    sizes = {one.name: one.num_bytes for one in mix.components}
    work = [mix.alone_s(name) * share for name, share in zip(mix.variants, mix.shares, strict=True)]
    first = 0.0
    for name, own in zip(mix.variants, work, strict=True):
        num_bytes = sum(sizes[component] for component in {m.component for m in mix.compiled(name).models})
        ranks = None
        if num_ranks is not None:
            last = first + own / sum(work) * num_ranks
            low = min(round(first), num_ranks - 1)
            ranks = tuple(range(low, max(low + 1, round(last))))
            first = last
        made.append(Component(name, num_bytes, num_bytes / LOAD_BYTES_PER_S, num_ranks is not None, ranks))
    return tuple(made)


def attainment(run: SimulationRun) -> float:
    return 100.0 * sum(request.met_deadline() for request in run.requests) / len(run.requests)


def _point(arguments: tuple[str, str, int, float, int, int, dict[str, Any]]) -> dict[str, Any]:
    system, setting, num_ranks, load, seed, num_requests, options = arguments
    run = simulate(system, setting, num_ranks, load, seed, num_requests, **options)
    return {
        "system": system,
        "setting": setting,
        "num_ranks": num_ranks,
        "load": load,
        "seed": seed,
        **options,
        "attainment": attainment(run),
        "num_loads": run.num_loads,
        "faults": len(run.faults),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path(f"benchmarks/results/workflows_{time.strftime('%Y-%m-%d')}.json")
    )
    args = parser.parse_args()
    loads = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    cells: list[tuple[str, str, int, float, int, int, dict[str, Any]]] = []
    for system in SYSTEMS:
        for seed in SEEDS:
            for setting in SETTINGS:
                cells += [(system, setting, 8, load, seed, args.requests, {}) for load in loads]
            cells += [(system, "S6", ranks, 0.5, seed, args.requests, {}) for ranks in (16, 32)]
            cells += [(system, "S6", 16, 0.5, seed, args.requests, {"slo_scale": s}) for s in (1.0, 1.5, 3.0, 4.0)]
            cells += [(system, "S6", 16, 0.25, seed, args.requests, {"cv": cv}) for cv in (2.0, 4.0, 8.0)]
            cells += [
                (system, s, 8, 0.8, seed, args.requests, {"admission": False}) for s in ("S1", "S2", "S3", "S4")
            ]
    with ProcessPoolExecutor(args.jobs) as pool:
        points = list(pool.map(_point, cells))
    summary = summarize(points)
    args.out.write_text(
        json.dumps({"command": "python -m benchmarks.workflow_report", "seeds": SEEDS, **summary}, indent=1)
    )
    print(table(summary))


def summarize(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean attainment and half of its 95 % interval over seeds, and the load sustained at 90 %."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for point in points:
        key = tuple(
            (name, value)
            for name, value in point.items()
            if name not in ("seed", "attainment", "num_loads", "faults")
        )
        groups.setdefault(key, []).append(point["attainment"])
    rows = [
        {**dict(key), "attainment": mean(values), "interval": 2.48 * stdev(values)}
        for key, values in groups.items()
    ]
    sustained = {
        setting: {system: _sustained(rows, system, setting) for system in SYSTEMS} for setting in SETTINGS
    }
    memory = {}
    for setting in SETTINGS:
        mix = paper_setting(setting)
        memory[setting] = sum(one.num_bytes for one in mix.components) / mix.num_bytes_apart()
    return {"sustained_load": sustained, "memory_of_separate_pipelines": memory, "rows": rows}


def _sustained(rows: Sequence[dict[str, Any]], system: str, setting: str) -> float:
    """The highest load up to which attainment is 90 % or more, between loads that were tried."""
    own = [
        r
        for r in rows
        if r["system"] == system and r["setting"] == setting and r["num_ranks"] == 8 and len(r) == 6
    ]
    best, before = 0.0, None
    for row in sorted(own, key=lambda row: row["load"]):
        if row["attainment"] < 90:
            if before is not None:
                share = (before["attainment"] - 90) / (before["attainment"] - row["attainment"])
                best = before["load"] + share * (row["load"] - before["load"])
            break
        best, before = row["load"], row
    return best


def table(summary: dict[str, Any]) -> str:
    lines = [
        "load sustained at 90 % (8 ranks), of what all ranks could do",
        "     " + "".join(f"{s:>9}" for s in SYSTEMS),
    ]
    for setting, by_system in summary["sustained_load"].items():
        lines.append(f"{setting:5}" + "".join(f"{by_system[s]:9.2f}" for s in SYSTEMS))
    lines.append("bytes of shared components / of separate pipelines:")
    lines.append(", ".join(f"{s} {share:.2f}" for s, share in summary["memory_of_separate_pipelines"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
