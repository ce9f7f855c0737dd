"""`gfdit bench serve`: send requests to a server when they are due, and say how it did.

The server may be any that has OpenAI's endpoints for images or videos. Options that `vllm bench serve` has as well
have its names, units and defaults.
"""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.cli import bench_requests

if TYPE_CHECKING:
    import httpx

    from gfdit.cli.replay import LoopLag, Outcome, ReplayOptions
    from gfdit.cli.server_counters import Samples
    from gfdit.sim.trace import TraceRequest

MS_PER_S = 1e3
SHORT_TIMEOUT_S = 10.0  # of what a server answers at once
SETTLE_S = 1.5  # a server's counters may be so late
MAX_ERRORS_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", required=True, help="e.g. http://127.0.0.1:8000")
    server.add_argument(
        "--endpoint",
        metavar="PATH",
        help="send everything there; default: by request, /v1/images/generations, /v1/images/edits or "
        "/v1/videos/sync; /v1/videos for jobs",
    )
    server.add_argument("--model", help="its name at the server; default: the first that /v1/models lists")
    server.add_argument("--header", metavar="KEY=VALUE", nargs="*", default=[], help="with each request")
    server.add_argument(
        "--extra-body", metavar="JSON", help="fields that replace those of each request; null takes one away"
    )
    server.add_argument(
        "--slo", action="store_true", help="tell the server deadlines and priorities (gfdit servers only)"
    )
    server.add_argument("--timeout-s", type=float, default=600.0, help="give a request up after this long")
    server.add_argument(
        "--ready-check-timeout-sec", type=int, default=0, help="wait so long for /v1/models first; default: 0"
    )
    server.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before those that count")
    bench_requests.configure(parser)
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="no more at a time: not an open loop then, what waits here is not the server's queue",
    )
    result = parser.add_argument_group("result")
    result.add_argument("--label", default="server", help="what to call the server in the result")
    result.add_argument("--grace-s", type=float, default=0.0, help="how late still counts as nearly in time")
    result.add_argument(
        "--goodput",
        nargs="+",
        metavar="e2el:MS",
        help="the deadline of every request in ms, instead of those of the trace",
    )
    result.add_argument(
        "--percentile-metrics",
        metavar="M,…",
        default="e2el",
        help="of these: e2el, from sending on; e2el_including_client_queue, from arrival on; client_queue_time",
    )
    result.add_argument("--metric-percentiles", metavar="P,…", default="99", help="default: 99")
    result.add_argument("--json", metavar="OUT", type=Path, help="write the result there")
    result.add_argument("--csv", metavar="OUT.csv", type=Path, help="write a row per request there")
    result.add_argument(
        "--save-result", action="store_true", help="write both, named by label, rate, model and date"
    )
    result.add_argument(
        "--result-dir", metavar="DIR", type=Path, default=Path(), help="where --save-result writes"
    )
    result.add_argument("--result-filename", metavar="NAME", help="of --save-result, instead of its own")
    result.add_argument("--images", metavar="DIR", type=Path, help="write each image there, by request id")
    parser.add_argument(
        "--input-image",
        metavar="PNG",
        type=Path,
        help="an image to edit, or to begin videos with, in each request",
    )


def run(args: argparse.Namespace) -> int:
    """0 if every request was completed, else 1."""
    from gfdit.cli.replay import LoopLag, ReplayOptions
    from gfdit.cli.replay_report import percentile_metrics, summarize
    from gfdit.sim.results import write_requests_csv

    metrics, percents = _percentiles(args)
    trace = bench_requests.requests_of(args)
    if args.goodput is not None:
        trace = bench_requests.with_deadline(trace, _goodput_s(args.goodput))
    options = ReplayOptions(
        _base_url(args.base_url),
        send_slo=args.slo,
        request_timeout_s=_positive(args.timeout_s, "--timeout-s"),
        input_image=args.input_image.read_bytes() if args.input_image else None,
        endpoint=args.endpoint,
        extra_body=_extra_body(args.extra_body),
        headers=_headers(args.header),
        max_concurrency=None
        if args.max_concurrency is None
        else _positive(args.max_concurrency, "--max-concurrency"),
        keep_images=args.images is not None,
    )
    _raise_file_limit()
    with _Server(options) as server:
        options = replace(options, model=args.model or server.model(args.ready_check_timeout_sec))
        _warm_up(trace, options, args.num_warmups)
        before, lag = server.samples(), LoopLag()
        outcomes = replay_with_progress(trace, options, args.label, lag)
        if before:
            time.sleep(SETTLE_S)
        after = server.samples()
    result = summarize(outcomes, label=args.label, grace_s=args.grace_s, loop_lag_s=lag.max_s)
    result |= {
        "source": _source(args, options),
        "percentile_metrics": percentile_metrics(outcomes, metrics, percents),
    }
    if before or after:
        _add_counters(result, before, after, outcomes)
    print(describe(result))
    for json_path, csv_path in _result_paths(args, options.model):
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(result, indent=1) + "\n")
        if csv_path is not None:
            write_requests_csv(csv_path, {args.label: result})
    if args.images is not None:
        write_images(outcomes, args.images)
    return 0 if all(outcome.completed for outcome in outcomes) else 1


def replay_with_progress(
    trace: "Sequence[TraceRequest]", options: "ReplayOptions", title: str, lag: "LoopLag | None" = None
) -> "list[Outcome]":
    """`replay`, with a bar that also counts failures and missed deadlines."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from gfdit.cli.replay import replay

    missed = failed = 0
    with tqdm(total=len(trace), desc=title, unit="request") as bar:

        def on_done(outcome: "Outcome") -> None:
            nonlocal missed, failed
            failed += not outcome.completed
            missed += outcome.completed and not outcome.met_deadline()
            bar.set_postfix({"late": missed, "failed": failed}, refresh=False)
            bar.update()

        return replay(trace, options, on_done, lag)


def describe(result: Mapping[str, Any]) -> str:
    """For a terminal: a row per class, what went wrong, how late the client was, what the server says."""
    from gfdit.sim.results import as_table

    classes = result["per_class"]
    rows = {**(classes if len(classes) > 1 else {}), "all": result}
    lines = [as_table("class", rows), in_one_line(result)]
    lines += [f"{name} {value:.1f}" for name, value in result.get("percentile_metrics", {}).items()]
    for kind in result["errors"][:MAX_ERRORS_SHOWN]:
        lines.append(f"{kind['count']} x {_status_name(kind['http_status'])}: {kind['error']}")
    if (more := len(result["errors"]) - MAX_ERRORS_SHOWN) > 0:
        lines.append(f"and {more} more kinds of errors")
    client = result["client"]
    lag_s = client["max_loop_lag_s"]
    late = "the client was the bottleneck: " if client["was_bottleneck"] else "client: "
    late += f"requests left p99 {MS_PER_S * client['p99_lateness_s']:.1f} ms late"
    late += f", at most {MS_PER_S * client['max_lateness_s']:.1f} ms"
    lines.append(
        late if lag_s is None else f"{late}; its clock readings were at most {MS_PER_S * lag_s:.1f} ms late"
    )
    if "server" in result:
        lines.append(result["server"]["text"])
    return "\n".join(lines)


def in_one_line(result: Mapping[str, Any]) -> str:
    """The main numbers in one line."""
    parts = [f"{result['num_completed']}/{result['num_requests']} completed"]
    if result["num_completed"]:
        parts += [
            f"{result['throughput_rps']:.2f} requests/s",
            f"latency mean {result['mean_latency_s']:.2f} s",
            f"p50 {result['p50_latency_s']:.2f} s",
            f"p95 {result['p95_latency_s']:.2f} s",
        ]
    parts.append(f"deadlines met {result['slo_attainment']:.0%}")
    return ", ".join([*parts, f"goodput {result['goodput_rps']:.2f} requests/s"])


def write_images(outcomes: "Sequence[Outcome]", directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        if outcome.image is not None:
            suffix = "mp4" if outcome.image[4:8] == b"ftyp" else "png"
            (directory / f"{picture_stem(outcome.id)}.{suffix}").write_bytes(outcome.image)


def picture_stem(request_id: str) -> str:
    """An id is the trace author's: it is kept from leaving the folder."""
    return re.sub(r"[^\w.-]", "_", request_id)


class _Server:
    """What is asked of the server besides requests."""

    def __init__(self, options: "ReplayOptions") -> None:
        import httpx

        self._base_url = options.base_url
        headers = dict(options.headers)
        self._client = httpx.Client(
            base_url=options.base_url, headers=headers, timeout=SHORT_TIMEOUT_S, trust_env=False
        )

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def model(self, wait_s: float) -> str | None:
        """The first model that the server lists; None if it lists none, as one that serves only images may.

        Raises ``ValueError`` if nobody answers, or none is listed within ``wait_s`` seconds.
        """
        give_up_s = time.monotonic() + wait_s
        while True:
            answer, problem = self._get("/v1/models")
            if answer is not None and answer.status_code == HTTPStatus.OK:
                with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                    return str(answer.json()["data"][0]["id"])
            if time.monotonic() >= give_up_s:
                break
            time.sleep(min(1.0, wait_s))
        if answer is None:
            raise ValueError(f"no server answers at {self._base_url}: {problem}")
        if wait_s:
            raise ValueError(f"{self._base_url}/v1/models lists no model after {wait_s:g} s: {answer.status_code}")
        return None

    def samples(self) -> "Samples":
        """Empty for a server without ``/metrics``."""
        from gfdit.cli.server_counters import read_samples

        answer, _ = self._get("/metrics")
        return {} if answer is None or answer.status_code != HTTPStatus.OK else read_samples(answer.text)

    def _get(self, path: str) -> "tuple[httpx.Response | None, str]":
        import httpx

        try:
            return self._client.get(path), ""
        except httpx.HTTPError as error:
            return None, str(error) or type(error).__name__


def _warm_up(trace: "Sequence[TraceRequest]", options: "ReplayOptions", count: int) -> None:
    """The trace's first requests under other names, one after another. Raises ``ValueError`` if one fails."""
    from gfdit.cli.replay import replay

    if count < 0:
        raise ValueError(f"--num-warmups must not be negative, got {count}")
    for index in range(count):
        request = replace(trace[index % len(trace)], id=f"warmup-{index}", arrival_s=0.0, deadline_s=None)
        (outcome,) = replay([request], options)
        if not outcome.completed:
            raise ValueError(f"a warm-up request failed: {_status_name(outcome.status)}: {outcome.error}")


def _add_counters(
    result: dict[str, Any], before: "Samples", after: "Samples", outcomes: "Sequence[Outcome]"
) -> None:
    from gfdit.cli import server_counters

    rows = server_counters.agreements(before, after, outcomes)
    ranks, busy_ratio = server_counters.ranks_and_busy_ratio(before, after, result["duration_s"])
    result |= {"ranks": ranks, "rank_busy_ratio": busy_ratio}
    result["server"] = {"figures": server_counters.as_json(rows), "text": server_counters.describe(rows)}


def _source(args: argparse.Namespace, options: "ReplayOptions") -> dict[str, Any]:
    """How to repeat it. Headers may be secrets: only their names."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base_url": options.base_url,
        "endpoint": options.endpoint,
        "model": options.model,
        "headers": sorted(options.headers),
        "trace": None if args.trace is None else str(args.trace),
        "workload": args.workload,
        "request_rate": _rate_name(args),
        "burstiness": args.burstiness,
        "seed": args.seed,
        "max_concurrency": options.max_concurrency,
        "send_slo": options.send_slo,
        "timeout_s": options.request_timeout_s,
        "images": None if args.images is None else str(args.images),
    }


def _rate_name(args: argparse.Namespace) -> str:
    if args.request_rate is not None:
        return f"{args.request_rate:g}"
    return "inf" if args.trace is None and args.workload is None else "trace"


def _result_paths(args: argparse.Namespace, model: str | None) -> Iterator[tuple[Path | None, Path | None]]:
    """Where to write JSON and CSV."""
    yield args.json, args.csv
    if args.save_result:
        date = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        base_model = (model or "model").rstrip("/").split("/")[-1]
        name = args.result_filename or f"{args.label}-{_rate_name(args)}qps-{base_model}-{date}.json"
        path = args.result_dir / name
        yield path, path.with_suffix(".csv")


def _status_name(status: int) -> str:
    return f"HTTP {status}" if status else "no answer"


def _base_url(text: str) -> str:
    if not re.match(r"https?://[^/]", text):
        raise ValueError(f"--base-url must begin with http:// or https://, got {text!r}")
    return text.rstrip("/")


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--header takes KEY=VALUE, got {wrong[0]!r}")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ValueError(f"--extra-body takes a JSON object, got {text!r}")
    return body


def _goodput_s(pairs: Sequence[str]) -> float:
    found = dict(pair.partition(":")[::2] for pair in pairs)
    if set(found) != {"e2el"}:
        raise ValueError(
            f"--goodput takes e2el:MS, the only one that images and videos have, got {' '.join(pairs)}"
        )
    return _positive(_number(found["e2el"], "--goodput e2el"), "--goodput e2el") / MS_PER_S


def _percentiles(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    from gfdit.cli.replay_report import METRICS

    metrics = args.percentile_metrics.split(",")
    if wrong := [name for name in metrics if name not in METRICS]:
        raise ValueError(f"--percentile-metrics: {wrong[0]!r} is unknown; allowed: {', '.join(METRICS)}")
    percents = [_number(text, "--metric-percentiles") for text in args.metric_percentiles.split(",")]
    if wrong_percents := [percent for percent in percents if not 0 <= percent <= 100]:
        raise ValueError(f"--metric-percentiles must be from 0 to 100, got {wrong_percents[0]:g}")
    return metrics, percents


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} takes numbers, got {text!r}") from None


def _positive(value: Any, option: str) -> Any:
    if not value > 0:
        raise ValueError(f"{option} must be a positive number, got {value}")
    return value


def _raise_file_limit() -> None:
    """Every request that is under way has an open file, and the limit is low for programs that use select()."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
