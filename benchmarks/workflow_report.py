"""Workflows in the simulator, after figures of the LegoDiffusion paper: a pool of components against pipelines.

Four systems serve the same requests, all with the same admission: components in one pool under ``triage`` and
under ``lego``; ``static``, whole pipelines bound to ranks of their own, as many as their share of the work asks
for; and ``swap``, whole pipelines that are loaded where they are wanted. Run with
``python -m benchmarks.workflow_report``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.core import Policy, Request, Task, TaskGraph, TaskKind
from gfdit.core.components import Component
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.core.layouts import ParallelSpec
from gfdit.core.policy.admission import with_admission
from gfdit.core.tasks import with_candidates
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage
from gfdit.sim.costs.workflow_costs import BASES, GIB, LOAD_BYTES_PER_S, SHAPE
from gfdit.sim.options import SimulationOptions
from gfdit.sim.simulator import SimulationRun, Simulator
from gfdit.sim.workflow_mixes import SETTINGS, Variant, WorkflowMix, paper_setting, production_mix

RANK_BYTES = 72 * GIB
SYSTEMS = ("triage", "lego", "static", "swap")
SEEDS = (11, 12, 13)
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
GOOD = 90.0
_T_95 = 4.303  # Student's, of three seeds


@dataclass(frozen=True)
class Point:
    """One simulation. ``load`` is the share of the time of ``load_ranks`` ranks that requests take alone."""

    section: str
    system: str
    setting: str
    load: float
    num_ranks: int = 8
    load_ranks: int | None = None  # as many as there are, unless said
    slo_scale: float = 2.0
    cv: float = 1.0
    admission: bool = True
    num_requests: int = 300
    seed: int = 0


@cache
def mix_of(setting: str) -> WorkflowMix:
    if setting == "production":
        return production_mix()
    kind, _, name = setting.partition("-")
    if kind == "lora":
        return paper_setting("S1", lora=True, hides_lora=name == "hidden")
    if nets := {"pair": ((), (1,)), "only": ((),), "net": ((1,),)}.get(kind):
        variants = [Variant(BASES[name], own) for own in nets]
        return WorkflowMix({one.name: one for one in variants}, (1.0,) * len(variants))
    return paper_setting(setting)


def simulate(point: Point) -> SimulationRun:
    mix, system = mix_of(point.setting), point.system
    lines = mix.trace(
        point.num_requests,
        load=point.load,
        num_ranks=point.load_ranks or point.num_ranks,
        cv=point.cv,
        slo_scale=point.slo_scale,
        seed=point.seed,
    )
    pool = system not in ("static", "swap")
    policy: Policy = Triage()
    if system != "triage":
        policy = Lego(batching=pool and system != "lego-shared", adaptive=system in ("lego", "lego-2"))
    if point.admission:
        policy = with_admission(policy, "deadline")
    options = SimulationOptions(
        point.num_ranks,
        dispatch_latency_s=2e-4,
        components=mix.components if pool else pipelines_of(mix, point.num_ranks if system == "static" else None),
        component_bytes=None if system == "static" else RANK_BYTES,
    )
    if not pool:
        return Simulator(policy, whole_costs(mix), lines, options, monolithic_graph).run()
    graphs = mix.graphs(point.num_ranks)
    if system == "lego-2":

        def graphs(request: Request) -> TaskGraph:
            both = (ParallelSpec(1, 2),) if request.cfg else (ParallelSpec(2),)
            return with_candidates(mix.graphs(point.num_ranks)(request), TaskKind.DENOISE, both)

    return Simulator(policy, mix.costs, lines, options, graphs).run()


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
    """Per cent of requests that met their deadlines; who was not admitted did not."""
    return 100.0 * sum(request.met_deadline() for request in run.requests) / len(run.requests)


def measured(point: Point) -> dict[str, Any]:
    run = simulate(point)
    latencies = sorted(latency for request in run.requests if (latency := request.latency_s) is not None)
    return {
        "attainment": attainment(run),
        "mean_latency_s": mean(latencies) if latencies else None,
        "last_latency_s": run.requests[-1].latency_s,
        "num_loads": run.num_loads,
        "faults": len(run.faults),
    }


def points(num_requests: int) -> list[Point]:
    """All but the seeds."""
    pools = [system for system in SYSTEMS if system in ("triage", "lego")]
    made = [
        Point("rate", system, setting, load, cv=cv)
        for system in SYSTEMS
        for setting in SETTINGS
        for cv, loads in ((1.0, LOADS), (4.0, (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)))
        for load in loads
        if system not in pools or load in (0.4, 0.6) or load >= 0.8
    ]
    for system in SYSTEMS:
        made += [Point("scale", system, "S6", 0.5, 16, slo_scale=s) for s in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 12.0)]
        made += [Point("burstiness", system, "S6", 0.4, 16, cv=cv) for cv in (1.0, 2.0, 4.0, 8.0)]
        made += [Point("size", system, "S6", 0.5, ranks, 16) for ranks in (6, 8, 10, 12, 16, 24, 32)]
        made += [
            Point("admission", system, setting, 1.2, admission=admission)
            for setting in ("S1", "S2", "S3", "S4")
            for admission in (True, False)
        ]
        if system != "static":  # of 174 workflows it would bind several to a rank each
            production = Point("production", system, "production", 0.5, 64, num_requests=6 * num_requests)
            made += [replace(production, load=load) for load in (0.5, 0.8)]
    for system in ("lego", "lego-1", "lego-2"):
        made += [Point("adaptive", system, "S1", load, 4, admission=False) for load in (0.3, 0.6)]
    for setting in ("pair-sd3", "pair-flux-dev"):
        made += [Point("sharing", s, setting, 0.6, 2, admission=False) for s in ("static", "lego-shared", "lego")]
    for setting in ("lora-hidden", "lora-waiting"):
        made += [Point("lora", "lego", setting, 0.3, admission=False)]
    alone = Point("alone", "lego", "", 0.01, 1, num_requests=12, admission=False)
    for base in BASES:
        solo, pair = (replace(alone, setting=setting) for setting in (f"only-{base}", f"net-{base}"))
        made += [replace(solo, num_ranks=ranks) for ranks in (1, 2, 4)]
        made += [replace(pair, num_ranks=ranks, system="lego-shared") for ranks in (1, 2)]
    return [
        one if one.section in ("production", "alone") else replace(one, num_requests=num_requests) for one in made
    ]


def fold(done: Iterable[tuple[Point, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over seeds, and halves of 95 % intervals."""
    groups: dict[Point, list[dict[str, Any]]] = {}
    for point, result in done:
        groups.setdefault(replace(point, seed=0), []).append(result)
    rows = []
    for point, results in groups.items():
        row = {key: value for key, value in asdict(point).items() if key != "seed"}
        for name in ("attainment", "mean_latency_s", "last_latency_s"):
            values = [result[name] for result in results if result[name] is not None]
            row[name] = round(mean(values), 4) if values else None
            row[f"{name}_half_interval"] = (
                round(_T_95 * stdev(values) / len(values) ** 0.5, 4) if len(values) == len(SEEDS) else None
            )
        row["num_loads"] = mean(result["num_loads"] for result in results)
        row["faults"] = sum(result["faults"] for result in results)
        rows.append(row)
    return rows


def sustained(rows: Sequence[dict[str, Any]], system: str, setting: str, cv: float) -> float:
    """The highest load up to which attainment is 90 % or more, between loads that were tried."""
    own = [
        row
        for row in rows
        if (row["section"], row["system"], row["setting"], row["cv"]) == ("rate", system, setting, cv)
    ]
    best, before = 0.0, None
    for row in sorted(own, key=lambda row: row["load"]):
        if row["attainment"] < GOOD:
            if before is not None:
                share = (before["attainment"] - GOOD) / (before["attainment"] - row["attainment"])
                best = before["load"] + share * (row["load"] - before["load"])
            break
        best, before = row["load"], row
    return best


def memory_shares() -> dict[str, float]:
    """Bytes of a setting's components, each once, of those of as many pipelines."""
    mixes = {setting: mix_of(setting) for setting in SETTINGS}
    return {s: sum(one.num_bytes for one in mix.components) / mix.num_bytes_apart() for s, mix in mixes.items()}


def scaling_s() -> dict[str, tuple[float, float]]:
    """Seconds to load the base model of a setting, and the pipeline of its largest workflow."""
    found = {}
    for setting in ("S1", "S2", "S3", "S4"):
        mix = mix_of(setting)
        (base,) = mix.bases
        load_s = {one.name: one.load_s for one in mix.components}
        largest = max(pipeline.load_s for pipeline in pipelines_of(mix))
        found[setting] = load_s[base.name], largest
    return found


def markdown(report: dict[str, Any]) -> str:
    rows = report["rows"]

    def section(name: str, **given: Any) -> list[dict[str, Any]]:
        return [r for r in rows if r["section"] == name and all(r[key] == value for key, value in given.items())]

    def cell(name: str, system: str, value: str = "attainment", **given: Any) -> str:
        (row,) = section(name, system=system, **given)
        if row[value] is None:
            return "-"
        digits, half = (0, 0) if value == "attainment" else (2, 2)
        spread = row[f"{value}_half_interval"]
        return f"{row[value]:.{digits}f}" + (f" ± {spread:.{half}f}" if spread is not None else "")

    lines = [
        "# Workflows: a pool of components against pipelines",
        "",
        *source_lines(report, f"Python {report['python']}"),
        f"- Simulated with costs that are published or derived (`gfdit.sim.costs.workflow_costs`); seeds {SEEDS}, "
        f"means and halves of 95 % intervals; {report['requests']} requests each, from empty ranks but for "
        "`static`",
        "- Load: the share of all ranks' time that requests take alone, one part after the other",
        "",
        "## Load sustained with 90 % of deadlines met (figure 9, a to f), 8 ranks",
        "",
        "| gaps' coefficient of variation | setting | triage | lego | static | swap | triage / static |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cv in ("1.0", "4.0"):
        for setting, found in report["sustained_load"][cv].items():
            ratio = f"{found['triage'] / found['static']:.1f}" if found["static"] else "-"
            cells = " | ".join(f"{found[system]:.2f}" for system in SYSTEMS)
            lines.append(f"| {cv} | {setting} | {cells} | {ratio} |")
    lines += [
        "",
        f"{LOADS[-1]:.2f} is the highest that was tried, 0.00: not even at the lowest. The target was 3 x static.",
    ]

    def sweep(title: str, name: str, key: str, head: str, systems: Sequence[str] = SYSTEMS, **given: Any) -> None:
        values = sorted({row[key] for row in section(name, **given)})
        lines.extend(["", f"## {title}", "", f"| {head} | " + " | ".join(systems) + " |"])
        lines.append("| --- " * (1 + len(systems)) + "|")
        for value in values:
            cells = " | ".join(cell(name, system, **given, **{key: value}) for system in systems)
            lines.append(f"| {value} | {cells} |")

    sweep("Deadlines met in per cent by SLO scale (9 g): S6, 16 ranks, load 0.5", "scale", "slo_scale", "scale")
    sweep("By burstiness (9 h): S6, 16 ranks, load 0.4", "burstiness", "cv", "coefficient of variation")
    sweep("By ranks (9 i): S6, what is load 0.5 of 16 ranks", "size", "num_ranks", "ranks")
    sweep(
        "Production mix: 87 base models, LoRAs, 64 ranks",
        "production",
        "load",
        "load",
        ("triage", "lego", "swap"),
    )
    lines += ["", "## Admission (figure 10, right): deadlines met in per cent at load 1.2, with and without", ""]
    lines += ["| setting | " + " | ".join(SYSTEMS) + " |", "| --- " * (1 + len(SYSTEMS)) + "|"]
    for setting in ("S1", "S2", "S3", "S4"):
        shown = [
            " / ".join(cell("admission", s, setting=setting, admission=on) for on in (True, False))
            for s in SYSTEMS
        ]
        lines.append(f"| {setting} | " + " | ".join(shown) + " |")
    lines += ["", "## Memory of a setting's workflows, of that of separate pipelines", ""]
    lines += [", ".join(f"{s} {share:.2f}" for s, share in report["memory_share"].items()) + " (target: 0.40)"]
    lines += ["", "## Seconds until one more rank serves: the base model, or the pipeline", ""]
    lines += [f"- {s}: {base:.2f} or {whole:.2f}" for s, (base, whole) in report["scaling_s"].items()]
    lines += [
        "",
        "## Sharing (figure 4, left): two workflows, with a ControlNet and without, 2 ranks, load 0.6",
        "",
    ]
    lines += [
        "| mean latency in seconds | a rank for each pipeline | shared components | and batched, at any degree |"
    ]
    lines += ["| --- | --- | --- | --- |"]
    for setting in ("pair-sd3", "pair-flux-dev"):
        shown = [cell("sharing", s, "mean_latency_s", setting=setting) for s in ("static", "lego-shared", "lego")]
        lines.append(f"| {setting.removeprefix('pair-')} | " + " | ".join(shown) + " |")
    lines += ["", "## Degrees (figure 4, right): S1, 4 ranks, mean latency in seconds", ""]
    lines += ["| load | degree 1 | degree 2 | adaptive |", "| --- | --- | --- | --- |"]
    for load in (0.3, 0.6):
        shown = [cell("adaptive", s, "mean_latency_s", load=load) for s in ("lego-1", "lego-2", "lego")]
        lines.append(f"| {load} | " + " | ".join(shown) + " |")
    lines += ["", "## A request alone (figure 10, left): latency on more ranks, of that on one", ""]
    lines += [
        "| base model | by degree on 2 | on 4 | ControlNet on a rank of its own |",
        "| --- | --- | --- | --- |",
    ]
    for base in BASES:
        one, two, four = (
            section("alone", setting=f"only-{base}", num_ranks=ranks)[0]["last_latency_s"] for ranks in (1, 2, 4)
        )
        same, apart = (
            section("alone", setting=f"net-{base}", num_ranks=ranks)[0]["last_latency_s"] for ranks in (1, 2)
        )
        lines.append(f"| {base} | {two / one:.2f} | {four / one:.2f} | {apart / same:.2f} |")
    hidden, waiting = (cell("lora", "lego", "mean_latency_s", setting=f"lora-{s}") for s in ("hidden", "waiting"))
    lines += [
        "",
        f"A LoRA for half of S1's requests: mean latency {hidden} s if it is read beside steps, {waiting} s",
    ]
    lines += [
        f"if steps wait for it (8 ranks, load 0.3). Mistakes of policies: {sum(row['faults'] for row in rows)}."
    ]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(3, 3).ravel()
    colours = dict(zip(SYSTEMS, ("#4477aa", "#ee6677", "#228833", "#ccbb44"), strict=True))
    what = [("rate", "load", {"setting": s, "cv": 1.0}, f"{s}, 8 ranks", "load") for s in SETTINGS]
    what += [
        ("scale", "slo_scale", {}, "S6, 16 ranks, load 0.5", "SLO scale"),
        ("burstiness", "cv", {}, "S6, 16 ranks, load 0.4", "coefficient of variation of gaps"),
        ("size", "num_ranks", {}, "S6, load 0.5 of 16 ranks", "ranks"),
    ]
    for axes, (name, key, given, title, label) in zip(panels, what, strict=True):
        for system in SYSTEMS:
            own = [
                row
                for row in report["rows"]
                if (row["section"], row["system"]) == (name, system)
                and all(row[field] == value for field, value in given.items())
            ]
            own.sort(key=lambda row: row[key])
            axes.errorbar(
                [row[key] for row in own],
                [row["attainment"] for row in own],
                [row["attainment_half_interval"] or 0.0 for row in own],
                color=colours[system],
                label=system,
                marker=".",
                capsize=2,
                linewidth=1.2,
            )
        axes.axhline(GOOD, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(title=title, xlabel=label, ylim=(0, 103))
        axes.title.set_fontsize(10)
    for axes in panels[::3]:
        axes.set_ylabel("deadlines met, %")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    todo = [replace(point, seed=seed) for point in points(args.requests) for seed in SEEDS]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = fold(zip(todo, pool.map(measured, todo, chunksize=4), strict=True))
    report |= {
        "requests": args.requests,
        "sustained_load": {
            str(cv): {s: {y: round(sustained(rows, y, s, cv), 3) for y in SYSTEMS} for s in SETTINGS}
            for cv in (1.0, 4.0)
        },
        "memory_share": memory_shares(),
        "scaling_s": scaling_s(),
        "rows": rows,
    }
    paths = write_report(args.out, "workflows", report, markdown(report))
    plot(report, paths[0].with_suffix(".png"))
    print(markdown(report))


if __name__ == "__main__":
    main()
