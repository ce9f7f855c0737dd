"""`gfdit workload import` and `gfdit workload from-recording`: traces of what was asked for elsewhere."""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gfdit.core.cost.table import TableCostModel
from gfdit.core.tasks import Shape
from gfdit.sim.arrivals import Pace
from gfdit.sim.cost_tables import load_cost_table
from gfdit.sim.importers import FIELDS, FORMATS, OTHER_MODELS, Condition, LogFormat, read_log, spread_ties
from gfdit.sim.log_traces import RequestMix, Size, trace_of
from gfdit.sim.recorded import recorded_trace
from gfdit.sim.request_classes import (
    DEFAULT_STEPS,
    SIZES,
    known_models,
    only_model,
    standard_factors,
    standard_shapes,
)
from gfdit.sim.shares import Shares, name_of, shape_of
from gfdit.sim.trace import MAX_STEPS, TraceRequest, write_trace

DEADLINE_FACTOR = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG.csv", type=Path, help="a CSV file with a header")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="csv",
        help="gentd26: lora_request_trace.csv of Alibaba's GenTD26, its text-to-image requests",
    )
    parser.add_argument(
        "--columns",
        metavar="FIELD=COLUMN,…",
        default="",
        help=f"which column says what: {', '.join(FIELDS)}",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="rows to keep; or COLUMN!=VALUE",
    )
    parser.add_argument("--select", metavar="FIRST:END", help="of these, in order of time: 0:3000, 22000:")
    parser.add_argument("--time-format", metavar="%d.%m.%Y…", help="of strptime; default: seconds, or ISO 8601")
    parser.add_argument(
        "--ties",
        choices=("spread", "keep"),
        default="spread",
        help="requests of one second, where the log has whole seconds: evenly within it, or all at its start",
    )
    parser.add_argument(
        "--models", metavar="M:SHARE,…", help="of requests whose model the log does not say; default: the only one"
    )
    parser.add_argument(
        "--model-names", metavar="LOGGED=MODEL,…", default="", help="models of the log; *=MODEL: all others"
    )
    parser.add_argument(
        "--sizes",
        action="append",
        default=[],
        metavar="[MODEL=]SIZE:SHARE,…",
        help="1024, 480x832 or 480x832x81, of requests whose size the log does not say; default: S, M, L, evenly",
    )
    parser.add_argument(
        "--steps",
        metavar="N:SHARE,…",
        default=str(DEFAULT_STEPS),
        help="denoising steps of requests of which the log does not say",
    )
    parser.add_argument(
        "--deadline-factors",
        type=float,
        nargs="+",
        metavar="F",
        help="deadlines as multiples of the time alone on one rank: one, or one for each of --sizes",
    )
    parser.add_argument("--slo-scale", type=float, default=1.0, help="all deadlines times this")
    parser.add_argument("--costs", nargs="+", metavar="C.json", required=True, help="cost tables: files or names")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks the load is relative to")
    parser.add_argument("--load", type=float, help="squeeze time to this load, one rank per request")
    parser.add_argument("--per-min", type=float, metavar="R", help="squeeze time to so many requests a minute")
    parser.add_argument("--time-factor", type=float, metavar="F", help="multiply all times")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--out", metavar="T.jsonl", type=Path, required=True, help="write the trace there")


def run(args: argparse.Namespace) -> int:
    cost = TableCostModel(load_cost_table(args.costs))
    pace = Pace(load=args.load, num_ranks=args.ranks, per_min=args.per_min, time_factor=args.time_factor)
    log, selection = _log_format(args), _selection(args.select)
    mix = _mix(args, cost, says_models="model" in log.columns)
    requests = read_log(args.log, log, known_models(cost))
    if args.ties == "spread":
        requests = spread_ties(requests)
    num_there, requests = len(requests), requests[selection]
    if not requests:
        raise ValueError(f"{args.log}: no request is left of {num_there}")
    trace = trace_of(requests, mix, cost, pace=pace, seed=args.seed)
    write_trace(args.out, trace)
    print(f"{args.out}: {summary(trace)}, {len(trace)} of {num_there} in the log")
    return 0


def configure_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", metavar="FILE", type=Path, help="what gfdit serve --record FILE has written")
    parser.add_argument(
        "--model-names",
        metavar="RECORDED=MODEL,…",
        default="",
        help="what a cost table calls the models; *=MODEL: all others",
    )
    parser.add_argument("--out", metavar="T.jsonl", type=Path, required=True, help="write the trace there")


def from_recording(args: argparse.Namespace) -> int:
    names = _pairs(args.model_names, "--model-names", "RECORDED=MODEL")
    recorded, num_masked = recorded_trace(args.recording)
    trace = [
        replace(request, model=names.get(request.model, names.get(OTHER_MODELS, request.model)))
        for request in recorded
    ]
    write_trace(args.out, trace)
    models = ", ".join(dict.fromkeys(request.model for request in trace))
    masked = f"; {num_masked} edits under a mask compute all here" if num_masked else ""
    print(f"{args.out}: {summary(trace)}; of {models}{masked}")
    return 0


def summary(trace: Sequence[TraceRequest]) -> str:
    counts = Counter(request.slo_class for request in trace)
    classes = ", ".join(f"{count} {name}" for name, count in counts.most_common(8))
    return f"{len(trace)} requests in {trace[-1].arrival_s:.0f} s: {classes}"


def _log_format(args: argparse.Namespace) -> LogFormat:
    columns = _pairs(args.columns, "--columns", "FIELD=COLUMN")
    log = FORMATS[args.format]
    log = LogFormat(columns) if log is None else replace(log, columns={**log.columns, **columns})
    return replace(
        log,
        where=(*log.where, *map(Condition.parse, args.where)),
        time_format=args.time_format,
        model_names=_pairs(args.model_names, "--model-names", "LOGGED=MODEL"),
    )


def _mix(args: argparse.Namespace, cost: TableCostModel, *, says_models: bool) -> RequestMix:
    known = known_models(cost)
    if args.models is not None:
        models = Shares.parse(args.models, str, "--models")
        for model in models.values:
            only_model(cost, model)
    else:
        models = Shares.even(known if says_models else [only_model(cost, None)])
    factors = args.deadline_factors
    if factors is not None and not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError(f"deadline factors must be positive numbers, got {factors}")
    if not (math.isfinite(args.slo_scale) and args.slo_scale > 0):
        raise ValueError(f"the SLO scale must be a positive number, got {args.slo_scale}")
    given = _sizes_by_model(args.sizes, known)
    sizes = {}
    for model in known if says_models else models.values:
        text = given.get(model, given.get(""))
        sizes[model] = _standard_sizes(cost, model, factors) if text is None else _sizes(text, factors)
    one_for_all = factors[0] if factors and len(factors) == 1 else DEADLINE_FACTOR
    return RequestMix(models, sizes, Shares.parse(args.steps, _steps, "--steps"), one_for_all, args.slo_scale)


def _sizes_by_model(given: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """What ``--sizes`` says; under an empty name for all the others."""
    found: dict[str, str] = {}
    for text in given:
        model, equals, sizes = text.rpartition("=")
        if equals and model not in known:
            raise ValueError(f"--sizes: no cost for model {model!r}, known: {', '.join(known)}")
        if model in found:
            raise ValueError(f"--sizes is there twice for {model or 'all models'}")
        found[model] = sizes
    return found


def _standard_sizes(cost: TableCostModel, model: str, factors: Sequence[float] | None) -> Shares[Size]:
    shapes = standard_shapes(cost, model)
    factors = standard_factors(shapes) if factors is None else _as_many(factors, len(shapes))
    return Shares.even(list(map(Size, SIZES, shapes, factors)))


def _sizes(text: str, factors: Sequence[float] | None) -> Shares[Size]:
    found: Shares[Shape] = Shares.parse(text, shape_of, "--sizes")
    factors = _as_many(factors or [DEADLINE_FACTOR], len(found.values))
    return Shares(tuple(map(Size, map(name_of, found.values), found.values, factors)), found.weights)


def _as_many(factors: Sequence[float], number: int) -> Sequence[float]:
    if len(factors) not in (1, number):
        raise ValueError(f"--deadline-factors takes one, or one for each of {number} sizes, got {len(factors)}")
    return list(factors) * number if len(factors) == 1 else factors


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_STEPS:
        raise ValueError(f"--steps: must be a whole number from 1 to {MAX_STEPS}, got {text!r}")
    return int(text)


def _selection(text: str | None) -> slice:
    first, colon, end = (text or ":").partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, end)):
        raise ValueError(f"--select takes FIRST:END, such as 0:3000 or 22000:, got {text!r}")
    return slice(int(first or 0), int(end) if end else None)


def _pairs(text: str, option: str, form: str) -> dict[str, str]:
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{option} takes {form} with commas between them, got {part!r}")
        pairs[key.strip()] = value
    return pairs
