"""`gfdit plan`: the fewest ranks that meet a target, what they cost, and what if."""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gfdit.cli.policy_options import add_policy_options, chosen_policies
from gfdit.cli.sim import add_steps_per_task, num_processes, progress, write_json
from gfdit.core.cost.file import CostTable
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plan import Answer, Demand, Requirement, Study, plan, up_to_degree
from gfdit.sim.trace import far_outside, read_trace
from gfdit.sim.workloads import PATTERNS

HOURS_A_DAY = 24


def configure(parser: argparse.ArgumentParser) -> None:
    demand = parser.add_mutually_exclusive_group(required=True)
    demand.add_argument("--workload", metavar="NAME", help="arrivals of a known pattern, as in `gfdit workload`")
    demand.add_argument("--trace", metavar="T.jsonl", type=Path, help="requests and their arrivals")
    parser.add_argument("--per-min", type=float, metavar="R", help="mean arrivals a minute of --workload")
    parser.add_argument("--duration-s", type=float, metavar="T", help="of each trace of --workload")
    parser.add_argument("--slo-scale", type=float, default=1.0, help="all deadlines of --workload times this")
    parser.add_argument("--model", help="which model of the cost table, where it has several")
    parser.add_argument("--steps", type=int, help="denoising steps of every request of --workload")
    parser.add_argument(
        "--costs", metavar="C.json", action="append", required=True, help="repeat: what if other GPUs"
    )
    parser.add_argument("--attainment", type=float, metavar="X", help="target: the share of requests in time")
    parser.add_argument("--mean-s", type=float, metavar="T", help="target: mean latency")
    parser.add_argument("--p99-s", type=float, metavar="T", help="target: the latency of all but one in a hundred")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="NAME:X",
        help="target: the share in time of a class, e.g. S:0.99; repeat",
    )
    parser.add_argument("--grace-s", type=float, default=0.0, help="how late still counts as in time")
    add_policy_options(parser)
    parser.add_argument("--seeds", type=int, metavar="N", default=10, help="traces of --workload to decide by")
    parser.add_argument("--first-seed", type=int, metavar="S", default=0)
    parser.add_argument(
        "--confidence", type=float, default=0.9, help="that another such trace meets the target (default 0.9)"
    )
    add_steps_per_task(parser)
    parser.add_argument("--max-ranks", type=int, metavar="N", default=256, help="to try")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", default=8)
    parser.add_argument("--price-per-rank-hour", type=float, metavar="P", help="to say what the answer costs")
    parser.add_argument(
        "--arrivals", action="append", default=[], metavar="xK", help="what if K times as many arrive; repeat"
    )
    parser.add_argument("--lose-node", action="store_true", help="what if one node less must do")
    parser.add_argument("--degrees", metavar="N,N,…", help="what if requests run on at most so many ranks")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes to simulate in (default: one per core)")
    parser.add_argument("--json", metavar="OUT", type=Path, help="write answers and all that was tried there")
    parser.add_argument("--csv", metavar="OUT.csv", type=Path, help="write the rows there")
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="draw attainment and p99 against ranks")


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. ``cost_per_1000`` is of a thousand requests."""

    what_if: str
    policy: str
    ranks: int | None
    nodes: int | None
    attainment: float | None
    mean_s: float | None
    p99_s: float | None
    rank_hours_a_day: int | None
    cost_a_day: float | None
    cost_per_1000: float | None


def run(args: argparse.Namespace) -> int:
    """Exit status 2 if no policy meets the target as asked; what if rows may fail."""
    studies = _studies(args)
    rows: list[Row] = []
    tried: dict[str, tuple[Answer, ...]] = {}
    for what_if, study in studies.items():
        with progress(f"plan, {what_if}", None) as step:
            answers = plan(study, num_processes=num_processes(args), on_done=step)
        tried[what_if] = answers
        rows += [_row(what_if, answer, study, args) for answer in answers]
        if args.lose_node and what_if == "as asked":
            rows += [_row("a node less", answer, study, args, spare_nodes=1) for answer in answers]
    base = studies["as asked"]
    targets = ", ".join(map(str, _asked(args)))
    of = "windows of the trace, drawn anew" if args.trace else f"seeds {base.seeds[0]} to {base.seeds[-1]}"
    print(f"target: {targets}; with confidence {base.confidence:g} for another such trace, by {of}")
    print(as_rows(rows))
    best = min((row for row in rows if row.what_if == "as asked" and row.ranks), key=_ranks, default=None)
    if best is not None:
        print(f"fewest: {_count(best.ranks, 'rank')} on {_count(best.nodes, 'node')} with {best.policy}")
    if args.json is not None:
        found = {name: [asdict(answer) for answer in answers] for name, answers in tried.items()}
        write_json(args.json, {"version": 1, "rows": [asdict(row) for row in rows], "tried": _finite(found)})
    if args.csv is not None:
        _write_csv(args.csv, rows)
    if args.plot is not None:
        from gfdit.sim.plots import plot_plan

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_plan(tried["as asked"], base.requirements, args.plot)
    if best is None:
        raise ValueError(f"no policy meets the target ({targets}) on up to {args.max_ranks} ranks")
    return 0


def _asked(args: argparse.Namespace) -> tuple[Requirement, ...]:
    found = []
    if args.attainment is not None:
        found.append(Requirement("attainment", args.attainment))
    if args.mean_s is not None:
        found.append(Requirement("mean_s", args.mean_s))
    if args.p99_s is not None:
        found.append(Requirement("p99_s", args.p99_s))
    for text in args.classes:
        name, colon, share = text.rpartition(":")
        if not (colon and name):
            raise ValueError(f"--class takes NAME:X, such as S:0.99, got {text!r}")
        found.append(Requirement("attainment", _number(share, "--class"), name))
    if not found:
        raise ValueError("a target is needed: --attainment, --mean-s, --p99-s or --class")
    return tuple(found)


def _studies(args: argparse.Namespace) -> dict[str, Study]:
    """By what if; the first is ``as asked``."""
    for name in ("seeds", "max_ranks", "ranks_per_node"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    if args.price_per_rank_hour is not None and not args.price_per_rank_hour >= 0:
        raise ValueError(f"--price-per-rank-hour must be a non-negative number, got {args.price_per_rank_hour}")
    if args.trace is not None:
        for name in ("per_min", "duration_s", "model", "steps"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of --workload; a trace has its own")
    tables = {name: load_cost_table(name) for name in args.costs}
    table = tables[args.costs[0]]
    pattern = PATTERNS.get(args.workload)
    if args.workload is not None and args.per_min is None and pattern is not None and not pattern.has_rate:
        raise ValueError(f"{args.workload} needs --per-min")
    trace = () if args.trace is None else tuple(read_trace(args.trace))
    if args.trace is not None and not trace:
        raise ValueError(f"{args.trace}: the trace has no requests")
    if doubt := far_outside(trace, table):
        print(f"gfdit plan: warning: {doubt}", file=sys.stderr)
    demand = Demand(
        table,
        args.workload or "",
        args.per_min,
        trace,
        slo_scale=args.slo_scale,
        duration_s=args.duration_s,
        model=args.model,
        num_steps=args.steps,
    )
    study = Study(
        demand,
        chosen_policies(args),
        _asked(args),
        SimulationOptions(1, steps_per_task=args.steps_per_task),
        seeds=tuple(range(args.first_seed, args.first_seed + args.seeds)),
        confidence=args.confidence,
        grace_s=args.grace_s,
        max_ranks=args.max_ranks,
    )
    studies = {"as asked": study}
    for text in args.arrivals:
        factor = _number(text.removeprefix("x"), "--arrivals")
        if not 0 < factor < math.inf:
            raise ValueError(f"--arrivals must be a positive factor such as x1.5, got {text!r}")
        studies[f"arrivals x{factor:g}"] = replace(study, demand=replace(demand, arrivals=factor))
    for name in args.costs[1:]:
        studies[f"costs {name}"] = replace(study, demand=_with_table(demand, tables[name]))
    for degree in [] if args.degrees is None else args.degrees.split(","):
        if not (degree.isdecimal() and int(degree)):
            raise ValueError(f"--degrees takes whole numbers with commas between them, got {args.degrees!r}")
        narrow = up_to_degree(table, int(degree))
        studies[f"degree ≤ {degree}"] = replace(study, demand=_with_table(demand, narrow))
    return studies


def _with_table(demand: Demand, table: CostTable) -> Demand:
    """What arrives, and when it is due, stays as it was: only the times of tasks are others."""
    return replace(demand, table=table, drawn_with=demand.table)


def _row(what_if: str, answer: Answer, study: Study, args: argparse.Namespace, spare_nodes: int = 0) -> Row:
    """With ``spare_nodes`` nodes are bought whole: those that are left have to hold the ranks that are needed."""
    if answer.num_ranks is None:
        return Row(what_if, answer.policy, None, None, None, None, None, None, None, None)
    verdict = answer.verdicts[answer.num_ranks]
    nodes = math.ceil(answer.num_ranks / args.ranks_per_node) + spare_nodes
    ranks = nodes * args.ranks_per_node if spare_nodes else answer.num_ranks
    means = {
        r.kind: mean for r, mean in zip(study.requirements, verdict.means, strict=True) if r.slo_class is None
    }
    price, per_hour = args.price_per_rank_hour, study.demand.per_hour(study.seeds[0])
    return Row(
        what_if,
        answer.policy,
        ranks,
        nodes,
        means.get("attainment"),
        means.get("mean_s"),
        means.get("p99_s"),
        ranks * HOURS_A_DAY,
        None if price is None else ranks * HOURS_A_DAY * price,
        None if price is None or not per_hour else 1000 * ranks * price / per_hour,
    )


_COLUMNS = (
    ("ranks", "ranks", "d"),
    ("nodes", "nodes", "d"),
    ("in time", "attainment", ".1%"),
    ("mean s", "mean_s", ".2f"),
    ("p99 s", "p99_s", ".2f"),
    ("rank-hours/day", "rank_hours_a_day", "d"),
    ("cost/day", "cost_a_day", ",.2f"),
    ("cost/1000", "cost_per_1000", ",.2f"),
)


def as_rows(rows: Sequence[Row]) -> str:
    """For a terminal; without the columns that no row has."""
    columns = [column for column in _COLUMNS if any(getattr(row, column[1]) is not None for row in rows)]
    wide, wider = (max(len(title), *map(len, texts)) for title, texts in _headings(rows))
    lines = [" ".join([f"{'what if':<{wide}} {'policy':<{wider}}", *(f"{title:>14}" for title, _, _ in columns)])]
    for row in rows:
        values = [getattr(row, field) for _, field, _ in columns]
        cells = ["-" if v is None else format(v, form) for v, (_, _, form) in zip(values, columns, strict=True)]
        lines.append(
            " ".join([f"{row.what_if:<{wide}} {row.policy:<{wider}}", *(f"{cell:>14}" for cell in cells)])
        )
    return "\n".join(lines)


def _headings(rows: Sequence[Row]) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    return ("what if", [row.what_if for row in rows]), ("policy", [row.policy for row in rows])


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def _finite(value: object) -> object:
    """JSON has no infinity: a bound that is not there is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ranks(row: Row) -> int:
    return row.ranks or 0


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} takes a number, got {text!r}") from None
