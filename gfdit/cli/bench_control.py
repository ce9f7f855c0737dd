"""`gfdit bench control`: how fast simulations, the control plane and the policies are."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from gfdit.cli.policy_options import add_policy_options, chosen_policies
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.sim import progress
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import known_policies
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.control_speed import SteadyState, additions_per_s, simulated_tasks_per_s
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.workflow_mixes import WorkflowMix, paper_setting
from gfdit.sim.workloads import PATTERNS, generate, request_classes, workload_classes

SPEED_COSTS, SPEED_RANKS, SPEED_LOAD = "wan2.2-synthetic", 8, 0.9
GROWTH = 10  # how many times the requests of the short trace the long one has
MIN_TASKS_PER_S, MIN_TASKS_PER_S_OTHERS = {"fcfs": 40_000, "triage": 30_000}, 15_000
MAX_GROWTH, MAX_SHARE = 12.0, 0.05
MAX_P99_S, MAX_P99_OF_FEW_S, FEW = 1e-2, 1e-3, 64  # of a decision, by requests in flight


def configure(parser: argparse.ArgumentParser) -> None:
    add_policy_options(parser, default="default: all installed")
    parser.add_argument(
        "--requests", type=int, default=100, help="of the short trace; the long one has ten times it"
    )
    parser.add_argument("--repeats", type=int, default=3, help="simulations of each trace; the fastest counts")
    parser.add_argument("--costs", default="qwen-image-h20", help="of the steady state: a file or a shipped name")
    parser.add_argument("--ranks", type=int, default=256, help="of the steady state")
    parser.add_argument("--in-flight", type=int, default=500, help="requests alive in the steady state")
    parser.add_argument("--tasks", type=int, default=12_000, help="measured in the steady state, after as many")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write dated JSON and Markdown there")


def run(args: argparse.Namespace) -> int:
    for name in ("requests", "repeats", "ranks", "in_flight", "tasks"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    load_average = os.getloadavg()[0]
    additions = additions_per_s()
    policies = chosen_policies(args) if getattr(args, "policies", None) else _installed()
    rows = []
    with progress("bench control", 2 * len(policies)) as step:
        for policy in policies:
            speed = _speed(policy, args)
            step()
            per_addition = 1e6 * speed["tasks_per_s"] / additions
            rows.append({"policy": policy.label, **speed, "per_addition": per_addition, **_steady(policy, args)})
            if getattr(policy.load(), "places_components", False):
                rows.append({"policy": f"{policy.label}, workflows", **_steady(policy, args, _workflows())})
            step()
    settings = {
        name: getattr(args, name) for name in ("requests", "repeats", "costs", "ranks", "in_flight", "tasks")
    }
    report = {
        **source,
        "load_average": load_average,
        "additions_per_s": additions,
        "settings": settings,
        "policies": rows,
    }
    print("\n".join(_table(rows)))
    print(f"this machine: {_millions(additions)}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.out is not None:
        write_report(args.out, "control", report, _markdown(report))
    return 0


def _installed() -> tuple[PolicyChoice, ...]:
    """Every installed policy that needs no arguments."""
    choices = []
    for name in known_policies():
        try:
            PolicyChoice(name).load()
        except ValueError:
            continue
        choices.append(PolicyChoice(name))
    return tuple(choices)


def _speed(policy: PolicyChoice, args: argparse.Namespace) -> dict[str, float]:
    table, workload = load_cost_table(SPEED_COSTS), PATTERNS["poisson"]
    classes = workload_classes(workload, TableCostModel(table))
    tasks_per_s = []
    for num_requests in (args.requests, GROWTH * args.requests):
        trace = generate(
            workload, classes, num_ranks=SPEED_RANKS, load=SPEED_LOAD, seed=1, num_requests=num_requests
        )
        runs = [simulated_tasks_per_s(policy.load(), table, trace, SPEED_RANKS) for _ in range(args.repeats)]
        tasks_per_s.append(max(runs))
    short, long = tasks_per_s
    return {"tasks_per_s": short, "tasks_per_s_long": long, "growth": GROWTH * short / long}


def _workflows() -> WorkflowMix:
    """Of 60 and of 89 tasks: FLUX with a net, and with two."""
    variants = [variant for variant in paper_setting("S4").variants.values() if variant.nets]
    return WorkflowMix({variant.name: variant for variant in variants}, (1.0,) * len(variants))


def _steady(
    policy: PolicyChoice, args: argparse.Namespace, workflows: WorkflowMix | None = None
) -> dict[str, float]:
    if workflows is None:
        table = load_cost_table(args.costs)
        classes = request_classes(TableCostModel(table))
    else:
        table, classes = workflows.costs, workflows.classes()
    state = SteadyState(
        policy.load(), table, classes, num_ranks=args.ranks, in_flight=args.in_flight, workflows=workflows
    )
    load = state.measure(args.tasks, warm_up=args.tasks)
    return {
        "mean_task_s": load.mean_task_s,
        "simulated_s": load.simulated_s,
        "num_decisions": len(load.decisions_s),
        "decision_p50_s": _percentile(load.decisions_s, 0.50),
        "decision_p99_s": _percentile(load.decisions_s, 0.99),
        "decision_wall_p99_s": _percentile(load.latencies_s, 0.99),
        "control_share": load.control_s / load.simulated_s,
        "policy_share": sum(load.decisions_s) / load.simulated_s,
        "control_s_per_task": load.control_s / load.num_tasks,
    }


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ascending = sorted(values)
    return ascending[math.ceil(share * len(ascending)) - 1]


_COLUMNS = (
    ("policy", "{policy}"),
    ("tasks/s", "{tasks_per_s:,.0f}"),
    ("10x: tasks/s", "{tasks_per_s_long:,.0f}"),
    ("10x: time", "{growth:.1f} x"),
    ("tasks/M additions", "{per_addition:,.0f}"),
    ("decision p50 ms", "{p50_ms:.3f}"),
    ("p99 ms", "{p99_ms:.3f}"),
    ("p99 ms, wall", "{wall_ms:.3f}"),
    ("control plane", "{control_share:.2%}"),
    ("us/task", "{us_per_task:.0f}"),
    ("policy", "{policy_share:.2%}"),
    ("step s", "{mean_task_s:.3f}"),
)


def _millions(additions: float) -> str:
    return f"{additions / 1e6:.1f} million additions a second in Python"


def _cells(row: dict[str, Any]) -> list[str]:
    in_ms = {
        "p50_ms": 1e3 * row["decision_p50_s"],
        "p99_ms": 1e3 * row["decision_p99_s"],
        "wall_ms": 1e3 * row["decision_wall_p99_s"],
        "us_per_task": 1e6 * row["control_s_per_task"],
    }
    known = row | in_ms
    return [form.format(**known) if _fields(form) <= known.keys() else "" for _, form in _COLUMNS]


def _fields(form: str) -> set[str | None]:
    return {field for _, field, _, _ in Formatter().parse(form)} - {None}


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For a terminal, in columns."""
    lines = [[title for title, _ in _COLUMNS], *map(_cells, rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(_COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs)
        )
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]


def _markdown(report: dict[str, Any]) -> str:
    settings = report["settings"]
    titles = [title for title, _ in _COLUMNS]
    table = [titles, ["---"] * len(titles), *map(_cells, report["policies"])]
    lines = [
        "# Speed of simulations, control plane and policies",
        "",
        *_verdicts(report["policies"], settings),
        "",
        *source_lines(
            report,
            f"Python {report['python']}",
            f"load average {report['load_average']:.1f}",
            _millions(report["additions_per_s"]),
        ),
        "- CPU times, and the wall clock where it says so; other programs stretch both",
        "",
        *("| " + " | ".join(line) + " |" for line in table),
        "",
        f"- Tasks/s: simulations of {settings['requests']} and {GROWTH * settings['requests']} requests, "
        f"50 steps, `{SPEED_COSTS}`, {SPEED_RANKS} ranks, load {SPEED_LOAD}; "
        f"the fastest of {settings['repeats']}. For each million additions of a loop in Python, too: "
        "by that, results of different machines compare",
        f"- The other columns: a request arrives for each that ends, of three sizes; `{settings['costs']}`; "
        f"{settings['tasks']} tasks, after as many to warm up",
        "- Control plane, policy: share of one core that each needs to keep up; step: mean time of a task there, "
        "small where a policy prefers short requests, since others always arrive",
    ]
    return "\n".join(lines) + "\n"


def _verdicts(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    def verdict(good: bool) -> str:
        return "reached" if good else "missed"

    workflows = [row for row in rows if "growth" not in row]
    rows = [row for row in rows if "growth" in row]
    growth = max(rows, key=lambda row: row["growth"])
    p99 = max(rows, key=lambda row: row["decision_p99_s"])
    share = max(rows, key=lambda row: row["control_share"])
    lines = []
    for row in rows:
        least = MIN_TASKS_PER_S.get(row["policy"], MIN_TASKS_PER_S_OTHERS)
        speed = min(row["tasks_per_s"], row["tasks_per_s_long"])
        lines.append(f"- {row['policy']}: {speed:,.0f} tasks/s (target {least:,}: {verdict(speed >= least)})")
    steady = f"{settings['ranks']} ranks, {settings['in_flight']} requests in flight"
    most_s = MAX_P99_OF_FEW_S if settings["in_flight"] <= FEW else MAX_P99_S
    return [
        *lines,
        f"- Ten times the requests take at most {growth['growth']:.1f} times as long ({growth['policy']}; target "
        f"{MAX_GROWTH:.0f}: {verdict(growth['growth'] <= MAX_GROWTH)})",
        f"- {steady}: a decision takes at most {1e3 * p99['decision_p99_s']:.3f} ms at p99 ({p99['policy']}; "
        f"target {1e3 * most_s:.0f} ms: {verdict(p99['decision_p99_s'] <= most_s)})",
        f"- {steady}: the control plane needs at most {share['control_share']:.2%} of a core, beside the policy "
        f"({share['policy']}; target {MAX_SHARE:.0%}: {verdict(share['control_share'] <= MAX_SHARE)})",
        *(
            f"- {steady}, {row['policy']}: a decision takes {1e3 * row['decision_p99_s']:.3f} ms at p99 (target "
            f"{1e3 * most_s:.0f} ms: {verdict(row['decision_p99_s'] <= most_s)}), the "
            f"control plane {row['control_share']:.2%} of a core (target {MAX_SHARE:.0%}: "
            f"{verdict(row['control_share'] <= MAX_SHARE)})"
            for row in workflows
        ),
    ]
