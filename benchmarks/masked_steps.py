"""What a step costs that computes the tokens under a mask only, alone and with others, and what waits for loads.

Tiny models in float32 on one CPU rank, 768 x 768 pixels, all steps of all kinds in turns. The last table is with
keys and values that come from a slower place than this machine's memory: each layer's take as long as at the
bandwidth that is given, beside what is computed. Run as `python -m benchmarks.masked_steps`.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.stats import linregress  # type: ignore[import-untyped]

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest
from gfdit.adapters.tiny_models import TinyModelSpec, build
from gfdit.cli.provenance import provenance, source_lines, write_report

FAMILIES = ("flux", "qwen-image", "sd3")
RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
SIDE = 768
STEPS = 7
MODEL = TinyModelSpec(num_layers=6, num_heads=4, head_dim=64)
HEAD = (
    "Milliseconds of a step (10th percentile) by the share of tokens under the mask; `full` computes all tokens.",
    "",
    "| family | full | " + " | ".join(f"{ratio:g}" for ratio in RATIOS) + " | R² | .1 to full |",
    "|---|---|" + "---|" * (len(RATIOS) + 2),
)
LOADING = (
    "Milliseconds of a step at mask ratio {ratio:g}, where loading all layers takes {share:g} of a full step:",
    "all tokens computed; all layers loaded first; each while the one before is computed, not across steps; as",
    "gfdit does, {ahead} layers on their way and so many leading blocks in full; and if nothing had to be loaded.",
    "",
    "| family | no cache | naive | block by block | gfdit | leading blocks | ideal |",
    "|---|---|---|---|---|---|---|",
)
BATCHES = (
    "Milliseconds of a step of {count} edits at mask ratios of {ratios}: one after the other, and in one pass,",
    "where every row has as many tokens as the longest.",
    "",
    "| family | one by one | in one pass | gain |",
    "|---|---|---|---|",
)
BATCH_RATIOS = (0.07, 0.09, 0.1, 0.12)
#: Of how long all layers' loading takes, in full steps.
LOAD_SHARE, LOAD_RATIO, AHEAD = 0.6, 0.1, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="requests of each kind")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report = provenance(sys.argv)
    report["command"] = report["command"].replace("benchmarks/masked_steps.py", "-m benchmarks.masked_steps")
    here = importlib.import_module("benchmarks.masked_steps")
    found: dict[str, Any] = {}
    with ForkServer() as server, tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            model = Path(folder) / family
            server.run(build, family, model, MODEL)
            with AdapterKit(model, 1, fork_server=server, comm_timeout_s=600) as kit:
                bench = Bench(kit, here, family, args.repeat)
                found[family] = bench.measure()
            for row in (_row, _batch_row, _loading_row):
                print(row(family, found[family]), flush=True)
    report["families"] = found
    text = ["# Steps of edits under a mask", "", *source_lines(report), "", *HEAD]
    text += [_row(family, each) for family, each in found.items()]
    ratios = ", ".join(map(str, BATCH_RATIOS))
    text += ["", *(line.format(count=len(BATCH_RATIOS), ratios=ratios) for line in BATCHES)]
    text += [_batch_row(family, each) for family, each in found.items()]
    about = {"ratio": LOAD_RATIO, "share": LOAD_SHARE, "ahead": AHEAD}
    text += ["", *(line.format(**about) for line in LOADING)]
    text += [_loading_row(family, each) for family, each in found.items()]
    write_report(args.out, "masked_steps", report, "\n".join([*text, ""]))


def _row(family: str, found: dict[str, Any]) -> str:
    steps = found["steps_s"]
    cells = " | ".join(f"{1e3 * steps[name]:.0f}" for name in ("full", *map(str, RATIOS)))
    return f"| {family} | {cells} | {found['r_squared']:.4f} | {steps['0.1'] / steps['full']:.2f} |"


def _batch_row(family: str, found: dict[str, Any]) -> str:
    one_by_one_s, together_s = found["batches_s"]
    return f"| {family} | {1e3 * one_by_one_s:.0f} | {1e3 * together_s:.0f} | {one_by_one_s / together_s:.2f} |"


def _loading_row(family: str, found: dict[str, Any]) -> str:
    loading = found["loading_s"]
    times = {name: f"{1e3 * seconds:.0f}" for name, seconds in loading.items() if name != "leading blocks"}
    first = " | ".join(times[name] for name in ("no cache", "naive", "block by block", "gfdit"))
    return f"| {family} | {first} | {loading['leading blocks']} | {times['ideal']} |"


class Bench:
    """Of one family; what it calls on the rank is in ``here``, this module as others import it."""

    def __init__(self, kit: AdapterKit, here: Any, family: str, repeat: int) -> None:
        self._kit, self._here, self._family, self._repeat = kit, here, family, repeat

    def measure(self) -> dict[str, Any]:
        (num_layers,) = self._kit.on_ranks(self._here.record, self._family)
        full, cached = self._edit(1.0, "exact"), self._edit(LOAD_RATIO, "cached")
        kinds = {"full": [full]} | {str(ratio): [self._edit(ratio, "cached")] for ratio in RATIOS}
        steps = self._in_turns(kinds)
        fit = linregress(RATIOS, [steps[str(ratio)] for ratio in RATIOS])
        several = [self._edit(ratio, "cached").but(seed=number) for number, ratio in enumerate(BATCH_RATIOS)]
        one_by_one_s = self._in_turns({"": several})[""]
        together_s = self._in_turns({"": several}, batched=True)[""]
        loading = {"no cache": steps["full"], "ideal": steps[str(LOAD_RATIO)]}
        layer_s = LOAD_SHARE * steps["full"] / num_layers
        ways = {"naive": (0, False, 0), "block by block": (1, False, 0), "gfdit": (AHEAD, True, None)}
        for name, how in ways.items():
            self._kit.on_ranks(self._here.load_slowly, layer_s, *how)
            loading |= self._in_turns({name: [cached]})
        (loading["leading blocks"],) = self._kit.on_ranks(self._here.leading_blocks)
        return {
            "steps_s": steps,
            "r_squared": fit.rvalue**2,
            "batches_s": (one_by_one_s, together_s),
            "loading_s": loading,
        }

    def _edit(self, ratio: float, mode: str) -> KitRequest:
        return edit_of(self._family, ratio, mode)

    def _in_turns(self, kinds: dict[str, list[KitRequest]], batched: bool = False) -> dict[str, float]:
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(self._repeat + 1):
            for name, requests in kinds.items():
                (steps,) = self._kit.on_ranks(self._here.steps_of, requests, batched)
                if number:  # the first one warms up
                    seconds[name] += steps
        return {name: statistics.quantiles(each, n=10)[0] for name, each in seconds.items()}


# In the rank's process


def edit_of(family: str, ratio: float, mode: str, **options: Any) -> KitRequest:
    """A mask of whole rows of tokens."""
    rows = round(ratio * SIDE / 16)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[: 16 * rows] = 255
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)).resize((SIDE, SIDE))
    given = {"multi_modal_data": {"image": image, "mask_image": Image.fromarray(mask)}}
    sampling = {"strength": 1.0, "extra_args": {"gfdit": {"edit": {"mode": mode, **options}}}}
    request = KitRequest(SIDE, SIDE, steps=STEPS, max_sequence_length=64, sampling=sampling, prompt_fields=given)
    return request.but(guidance_scale=1.0) if family == "sd3" else request


def record(executor: Any, family: str) -> int:
    """All steps of the template; returns how many layers there are."""
    from gfdit.adapters.forward.templates import Templates
    from gfdit.adapters.masked_tokens import blocks_of
    from gfdit.templates.store import TemplateStore

    folder = Path(tempfile.mkdtemp(prefix="gfdit-masked-steps-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    executor.adapter.templates = templates = Templates(TemplateStore(None, folder, host_bytes=8 << 30), 0)
    steps_of(executor, [edit_of(family, 1.0, "record")])
    templates.flush()
    return sum(num_layers for _, num_layers in blocks_of(executor.runner.pipeline.transformer))


def steps_of(executor: Any, requests: list[KitRequest], batched: bool = False) -> list[float]:
    """Seconds of each step of all, but for the first; nothing is decoded."""
    from vllm_omni.diffusion.registry import get_diffusion_pre_process_func

    from gfdit.adapters.base import TaskCall
    from gfdit.core.layouts import ExecutionLayout
    from gfdit.core.tasks import TaskKind

    layout = ExecutionLayout((executor.rank,))
    prepare = get_diffusion_pre_process_func(executor.runner.od_config) or (lambda request: request)
    asked = [prepare(request.to_omni(f"measured-{number}")) for number, request in enumerate(requests)]
    artifacts: dict[str, Any] = {}
    seconds = []
    for tasks in zip(*(executor.adapter.convert(one, 1).graph.tasks for one in asked), strict=True):
        if tasks[0].kind is TaskKind.DECODE:
            break
        calls = []
        for task, one in zip(tasks, asked, strict=True):
            inputs = tuple([artifacts[name] for name in task.inputs])
            calls.append(TaskCall(task, inputs, None if inputs else one))
        start_s = time.perf_counter()
        if batched and tasks[0].kind is TaskKind.DENOISE:
            outputs = executor.run(calls, layout)
        else:
            outputs = [output for call in calls for output in executor.run([call], layout)]
        if tasks[0].kind is TaskKind.DENOISE:
            seconds.append(time.perf_counter() - start_s)
        for task, output in zip(tasks, outputs, strict=True):
            artifacts.update(zip(task.outputs, output.artifacts, strict=True))
    executor.adapter.forget(tuple(artifacts))
    return seconds[1:]


def load_slowly(executor: Any, layer_s: float, num_ahead: int, crosses_steps: bool, num_full: int | None) -> None:
    """From now on layers take ``layer_s`` to load, ``num_ahead`` of them ahead of their use."""
    from gfdit.adapters.forward import templates as module

    templates, gather = executor.adapter.templates, getattr(module.gather, "__wrapped__", module.gather)

    @functools.wraps(gather)
    def slow(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        values = gather(*args, **kwargs)
        time.sleep(max(0.0, start_s + layer_s - time.perf_counter()))
        return values

    module.gather = slow
    templates.num_ahead, templates.crosses_steps, templates.num_full_blocks = num_ahead, crosses_steps, num_full


def leading_blocks(executor: Any) -> int:
    return int(executor.adapter.templates.pace.num_full_blocks)


if __name__ == "__main__":
    main()
