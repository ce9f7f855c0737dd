"""What step caches save: requests with a cache and without, of the stock pipeline and of gfdit.

On one rank and on two, the same tiny model in float32. Random weights change more from step to step than
trained ones do, so thresholds are higher than one would choose. Run as `python -m benchmarks.step_caches`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest
from gfdit.adapters.tiny_models import TinyModelSpec, build
from gfdit.cli.provenance import provenance, source_lines, write_report

FORWARD = "gfdit.adapters.forward.adapter:ForwardAdapter"
CACHES: dict[str, dict[str, Any]] = {
    "none": {},
    "tea_cache": {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.6}},
    "cache_dit": {
        "cache_backend": "cache_dit",
        "cache_config": {"residual_diff_threshold": 0.9, "max_continuous_cached_steps": 2},
    },
}
REQUEST = KitRequest(256, 256, seed=1, steps=20, negative_prompt=" ", true_cfg_scale=4.0)
WHO: dict[str, Callable[[AdapterKit], Any]] = {
    "stock, 1 rank": lambda kit: kit.stock(REQUEST),
    "gfdit, 1 rank": lambda kit: kit.run(REQUEST, "sp1@0"),
    "stock, SP 2": lambda kit: kit.stock(REQUEST, ulysses_degree=2),
    "gfdit, SP 2": lambda kit: kit.run(REQUEST, "sp2@0,1"),
}


#: By who served, and by cache.
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="requests of 20 steps of each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["command"] = report["command"].replace("benchmarks/step_caches.py", "-m benchmarks.step_caches")
    with ExitStack() as stack:
        server = stack.enter_context(ForkServer())
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "qwen-image"
        server.run(build, "qwen-image", model, TinyModelSpec(num_layers=8, num_heads=4, head_dim=64))
        seconds: dict[str, Times] = {
            of: {who: {name: [] for name in CACHES} for who in WHO} for of in ("clock", "processor")
        }
        for name, config in CACHES.items():  # one kit after the other: each has five processes with a model
            with AdapterKit(
                model, 2, adapter=FORWARD, od_config=config, fork_server=server, comm_timeout_s=600
            ) as kit:
                for who, serve in WHO.items():
                    for number in range(args.rounds + 1):
                        start_s, processor_start_s = time.perf_counter(), _processor_s()
                        serve(kit)
                        if number:  # the first one warms up
                            seconds["clock"][who][name].append(time.perf_counter() - start_s)
                            seconds["processor"][who][name].append(_processor_s() - processor_start_s)
                    print(name, who, [round(each, 2) for each in seconds["processor"][who][name]], flush=True)
    report |= {"seconds": seconds, "load_average": os.getloadavg()}
    load = f"load average {report['load_average'][2]:.0f} over the last 15 minutes"
    text = ["# What step caches save", "", *source_lines(report, load), ""]
    for of, times in seconds.items():
        text += [*_head(of), *(_row(who, each) for who, each in times.items()), ""]
    write_report(args.out, "step_caches", report, "\n".join(text))
    print("\n".join(text))


def _processor_s() -> float:
    """Of all processes of the benchmark, ever. A rank that waits for another one takes some, too."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _head(of: str) -> list[str]:
    return [
        f"Median seconds by the {of} of a guided request of 20 steps; in brackets, times less than without.",
        "",
        "| | none | TeaCache | cache-dit |",
        "|---|---|---|---|",
    ]


def _row(who: str, times: dict[str, list[float]]) -> str:
    none_s, *cached_s = [statistics.median(each) for each in times.values()]
    return (
        f"| {who} | {none_s:.3f} | " + " | ".join(f"{each:.3f} ({none_s / each:.2f})" for each in cached_s) + " |"
    )


if __name__ == "__main__":
    main()
