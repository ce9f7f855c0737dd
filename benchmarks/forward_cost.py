"""What a step costs more by the stock `forward` than by an adapter written by hand, and what a replay takes.

Both drive the same loaded tiny model on one CPU rank, in turns: steps are some milliseconds, so that what Python
adds can be seen. Run as `python -m benchmarks.forward_cost`. By hand is what the tests have for pipelines with
vLLM-Omni's step execution; figures of seven families are of the commit that still had an adapter of each.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest
from gfdit.adapters.tiny_models import TinyModelSpec, build
from gfdit.cli.provenance import provenance, source_lines, write_report

FORWARD = "gfdit.adapters.forward.adapter:ForwardAdapter"
IMAGE = KitRequest(128, 128, steps=20, guidance_scale=4.0, max_sequence_length=128)
BY_HAND = "tests.adapters.by_hand:StepExecutionAdapter"
CASES = {"qwen-image": IMAGE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=8, help="requests of 20 steps by each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["command"] = report["command"].replace("benchmarks/forward_cost.py", "-m benchmarks.forward_cost")
    of_family: dict[str, Any] = {}
    # By its name, under which the processes of the kit find it.
    here = importlib.import_module("benchmarks.forward_cost")
    with ForkServer() as server, tempfile.TemporaryDirectory() as folder:
        for family, request in CASES.items():
            model = Path(folder) / family
            server.run(build, family, model, TinyModelSpec())
            with AdapterKit(model, 1, adapter=FORWARD, fork_server=server) as kit:
                (found,) = kit.on_ranks(here.measure, request, BY_HAND, args.repeat)
            of_family[family] = dict(
                zip(("hand_s", "forward_s", "replay_10_s", "replay_19_s"), found, strict=True)
            )
            print(_row(family, of_family[family]), flush=True)
    report["families"] = of_family
    rows = [_row(family, found) for family, found in of_family.items()]
    text = ["# A step by the stock forward and by hand", "", *source_lines(report), "", *_HEAD, *rows, ""]
    write_report(args.out, "forward_cost", report, "\n".join(text))


_HEAD = (
    "Times are the fastest tenth of all steps (10th percentile), one rank, guided where the model is.",
    "",
    "| family | by hand, ms | by forward, ms | more, us | replay before step 10, ms | before step 19, ms |",
    "|---|---|---|---|---|---|",
)


def _row(family: str, found: dict[str, float]) -> str:
    more_us = (found["forward_s"] - found["hand_s"]) * 1e6
    hand, forward, mid, last = (f"{1e3 * seconds:.2f}" for seconds in found.values())
    return f"| {family} | {hand} | {forward} | {more_us:.0f} | {mid} | {last} |"


def measure(executor: Any, request: KitRequest, hand_path: str, repeat: int) -> tuple[float, ...]:
    """Seconds of the fastest tenth of steps by hand and by forward, of a replay in the middle and at the end."""
    from gfdit.adapters.registry import make_adapter

    forward = executor.adapter
    hand = make_adapter(executor.runner.od_config, 1, hand_path)
    hand.bind(forward.pipeline, executor.device)
    seconds: dict[int, list[float]] = {id(hand): [], id(forward): []}
    for number in range(repeat + 1):
        for adapter in (hand, forward):
            executor.adapter = adapter
            found, _ = run(executor, request, copies=False)
            if number:  # the first one warms up
                seconds[id(adapter)] += found[1:]
    _, replays = run(executor, request, copies=True)
    fastest = [statistics.quantiles(seconds[id(adapter)], n=10)[0] for adapter in (hand, forward)]
    return fastest[0], fastest[1], replays[len(replays) // 2], replays[-1]


def run(executor: Any, request: KitRequest, copies: bool) -> tuple[list[float], list[float]]:
    """Seconds of each step; with ``copies``, of which no suspended forward knows, of the replay before each."""
    from vllm_omni.diffusion.registry import get_diffusion_pre_process_func

    from gfdit.adapters.base import TaskCall
    from gfdit.core.layouts import ExecutionLayout
    from gfdit.core.tasks import TaskKind

    asked = request.to_omni("measured")
    if (prepare := get_diffusion_pre_process_func(executor.runner.od_config)) is not None:
        asked = prepare(asked)
    steps, replays = [], []
    artifacts: dict[str, Any] = {}
    for task in executor.adapter.convert(asked, 1).graph.tasks:
        inputs = tuple([artifacts[name] for name in task.inputs])
        call = TaskCall(task, inputs, None if inputs else asked)
        if copies and task.kind is TaskKind.DENOISE:
            call = TaskCall(task, tuple([dict(artifact) for artifact in inputs]), None)
            start_s = time.perf_counter()
            with executor.alone():
                executor.adapter.replay([call])
            replays.append(time.perf_counter() - start_s)
            with executor.alone():
                (output,) = executor.adapter.execute([call], ExecutionLayout((executor.rank,)))
        else:
            start_s = time.perf_counter()
            (output,) = executor.run([call], ExecutionLayout((executor.rank,)))
            if task.kind is TaskKind.DENOISE:
                steps.append(time.perf_counter() - start_s)
        artifacts.update(zip(task.outputs, output.artifacts, strict=True))
        for name in task.inputs:  # a step consumes its latents
            if name.startswith(f"{task.request_id}/latents"):
                del artifacts[name]
    return steps, replays


if __name__ == "__main__":
    main()
