"""Whether a server that runs for long stays as large as it is: mixed sizes, clients that leave, bad requests.

The real engine on two CPU ranks with a tiny Qwen-Image serves images of many sizes at a share of what it can do,
which is measured first. Meanwhile the size of each of its processes is read from the kernel, and asked of workers.
Run with ``python -m benchmarks.endurance``; half an hour by default, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from gfdit.cli.main import main as gfdit
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.omni.plugin import prepare_cpu_process
from gfdit.runtime.host_memory import KEPT_BYTES, FreedMemory
from tests.support.images import ImageRequest

NUM_RANKS = 2
NUM_SIZES = 200
SIDES = range(64, 289, 16)
KINDS = {"image": 0.85, "leaves": 0.1, "bad": 0.05}
BAD = ({"height": 1_000_000}, {"prompt": "panda " * 3_000})  # one is refused at the door, one fails in a worker
LONGEST_STAY_S = 2.0  # of a client that leaves
CAPACITY_CLIENTS = 8
MAX_ALIVE = 64

# What is flat: of the last two thirds of a run, what a straight line through all samples gains, and what the mean
# of the last third gains on that of the one before, are at most this share of the mean, or this much.
MAX_GROWTH = 0.05
LITTLE = {"MB": 4.0, "": 2.0}
MB = 1 << 20
# The RSS of a worker rises and falls with what it keeps of freed memory. It is to stay below what it is with
# nothing kept and with what it works with, and this: what may be kept, which is looked at now and then.
ABOVE_MB = KEPT_BYTES / MB + 256.0
MOST_IN_USE = "most in use by malloc"
WATCH_EVERY_S = 0.02
WITH_NOTHING_KEPT = "own memory with nothing kept"
NUM_LOOKS = 12  # at what is left with nothing kept
# Of what is mapped, pages are resident once they were touched: at most all of them.
MAPPED = "mapped"
ARTIFACTS = "artifacts"  # as many as there are requests

Caches = dict[str, tuple[int, int | None]]
"""(entries, limit) of every ``functools.lru_cache`` of modules and their classes, by name."""


@dataclass
class Series:
    """One quantity over time."""

    name: str
    unit: str
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at_s: float, value: float) -> None:
        self.times_s.append(at_s)
        self.values.append(value)

    def by_minute(self) -> list[float]:
        """Means, for the report."""
        minutes: dict[int, list[float]] = {}
        for at_s, value in zip(self.times_s, self.values, strict=True):
            minutes.setdefault(int(at_s // 60), []).append(value)
        return [round(fmean(values), 1) for values in minutes.values()]


@dataclass(frozen=True)
class Growth:
    """Of a series in the last two thirds of a run, in its unit."""

    mean: float
    largest: float
    per_minute: float
    by_line: float
    by_thirds: float
    allowed: float

    @property
    def flat(self) -> bool:
        return max(self.by_line, self.by_thirds) <= self.allowed


def growth(series: Series, run_s: float) -> Growth:
    """Raises ``ValueError`` if a third has no sample."""
    points = [(t, v) for t, v in zip(series.times_s, series.values, strict=True) if t >= run_s / 3]
    thirds = [[v for t, v in points if t < 2 * run_s / 3], [v for t, v in points if t >= 2 * run_s / 3]]
    if not all(thirds):
        raise ValueError(f"{series.name}: no sample in a third of {run_s:g} s")
    mean_t, mean = fmean(t for t, _ in points), fmean(v for _, v in points)
    per_s = sum((t - mean_t) * (v - mean) for t, v in points) / sum((t - mean_t) ** 2 for t, _ in points)
    return Growth(
        mean=mean,
        largest=max(v for _, v in points),
        per_minute=60 * per_s,
        by_line=per_s * (points[-1][0] - points[0][0]),
        by_thirds=fmean(thirds[1]) - fmean(thirds[0]),
        allowed=max(MAX_GROWTH * mean, LITTLE[series.unit]),
    )


def judge(all_series: dict[str, Series], run_s: float) -> dict[str, dict[str, Any]]:
    """By name: how it grew, and a verdict of "flat", "grows", "below ..." or "above ..."; none on some."""
    judged: dict[str, dict[str, Any]] = {}
    for name, series in all_series.items():
        found, (process, _, quantity) = growth(series, run_s), name.partition(": ")
        verdict = "flat" if found.flat else "grows"
        if quantity in ("PSS", "kept of what was freed", MAPPED, ARTIFACTS, MOST_IN_USE):
            verdict = ""
        elif quantity == "RSS" and (with_nothing_kept := all_series.get(f"{process}: {WITH_NOTHING_KEPT}")):
            own = [all_series[f"{process}: {name}"].values for name in (MAPPED, MOST_IN_USE)]
            limit = with_nothing_kept.values[-1] + own[0][-1] + max(own[1]) - min(own[1]) + ABOVE_MB
            verdict = f"{'below' if max(series.values) <= limit else 'above'} {limit:.0f}"
        numbers = {key: round(value, 2) for key, value in asdict(found).items()}
        judged[name] = {"unit": series.unit, "verdict": verdict, **numbers, "by_minute": series.by_minute()}
    return judged


def is_good(report: dict[str, Any]) -> bool:
    verdicts = [found["verdict"] for found in report["series"].values()]
    return not report["unexpected"] and not any(verdict.startswith(("grows", "above")) for verdict in verdicts)


class Extension:
    """Mixed into the workers (vLLM-Omni's ``worker_extension_cls``)."""

    _watched: Any = None

    def python_caches(self) -> Caches:
        found = {}
        for module in list(sys.modules.values()):
            for owner in (module, *(value for value in vars(module).values() if isinstance(value, type))):
                for value in list(vars(owner).values()):
                    if isinstance(value, functools._lru_cache_wrapper):
                        info = value.cache_info()
                        found[f"{value.__module__}.{value.__qualname__}"] = info.currsize, info.maxsize
        return found

    def most_in_use(self) -> int:
        """Bytes that malloc had given out at most since this was asked before; the first time, from now on."""
        if self._watched is None:
            self._watched = [0]
            threading.Thread(target=self._watch, daemon=True).start()
        most, self._watched[0] = self._watched[0], 0
        return most or FreedMemory().measure().in_use_bytes

    def _watch(self) -> None:
        memory = FreedMemory()
        while True:
            self._watched[0] = max(self._watched[0], memory.measure().in_use_bytes)
            time.sleep(WATCH_EVERY_S)

    def resident_with_nothing_kept(self) -> tuple[int, int]:
        """Bytes of its own, and of what is mapped: files and what ranks share, as far as they were touched."""
        gc.collect()
        own_bytes = FreedMemory().measure().resident_bytes  # gives back what is kept
        return own_bytes, psutil.Process().memory_info().rss - own_bytes


class Sampler:
    """Reads the sizes of this process, which serves the API, of the control process and of the workers."""

    def __init__(self, omni: Any, every_s: float) -> None:
        self._omni = omni
        self._every_s = every_s
        self._start_s = time.monotonic()
        self._processes: dict[str, psutil.Process] = {}
        self._run_dir = Path()
        self.series: dict[str, Series] = {}
        self.caches: list[Caches] = []

    async def find_processes(self) -> None:
        """Once, when the server is there; one that is replaced ends the run with ``NoSuchProcess``."""
        me = psutil.Process()
        self._processes = {"API server": me}
        for process in me.children(recursive=True):
            command = " ".join(process.cmdline())
            if "gfdit.runtime.control_process" in command:
                self._processes["control"] = process
                paths = [Path(c.laddr) for c in process.net_connections("unix") if c.laddr]
                self._run_dir = next(path.parent for path in paths if path.name == "events")
            elif "multiprocessing.forkserver" in command:
                self._processes["fork server"] = process
        for rank, described in enumerate(await self._call("gfdit_describe")):
            self._processes[f"worker {rank}"] = psutil.Process(described["pid"])
        await self._call("python_caches")  # what looking at them takes is not to be taken for growth

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self._sample()
            await asyncio.sleep(self._every_s)

    async def give_back(self) -> None:
        """What is left of workers when they give back all they keep, and what is in their caches."""
        for rank, (own_bytes, mapped_bytes) in enumerate(await self._call("resident_with_nothing_kept")):
            self._add(f"worker {rank}: {WITH_NOTHING_KEPT}", "MB", own_bytes / MB)
            self._add(f"worker {rank}: {MAPPED}", "MB", mapped_bytes / MB)
        for rank, artifacts in enumerate(await self._call("gfdit_artifacts")):
            self._add(f"worker {rank}: artifacts of no request", "", len(artifacts))
        self.caches.append(largest(await self._call("python_caches")))

    async def _sample(self) -> None:
        for name, process in self._processes.items():
            for quantity, (unit, value) in _sizes(process).items():
                self._add(f"{name}: {quantity}", unit, value)
        for rank, memory in enumerate(await self._call("gfdit_memory")):
            self._add(f"worker {rank}: in use by malloc", "MB", memory["in_use_bytes"] / MB)
            self._add(f"worker {rank}: kept of what was freed", "MB", memory["kept_bytes"] / MB)
        for rank, most_bytes in enumerate(await self._call("most_in_use")):
            self._add(f"worker {rank}: {MOST_IN_USE}", "MB", most_bytes / MB)
        for rank, artifacts in enumerate(await self._call("gfdit_artifacts")):
            self._add(f"worker {rank}: {ARTIFACTS}", "", len(artifacts))
        self._add("files in the run folder", "", sum(1 for _ in self._run_dir.rglob("*")))
        self._add("results in shared memory", "", sum(1 for _ in Path("/dev/shm").glob("psm_*")))

    async def _call(self, method: str) -> list[Any]:
        """By rank."""
        return (await self._omni.collective_rpc(method))[0]

    def _add(self, name: str, unit: str, value: float) -> None:
        self.series.setdefault(name, Series(name, unit)).add(time.monotonic() - self._start_s, value)


def _sizes(process: psutil.Process) -> dict[str, tuple[str, float]]:
    """(unit, value) by quantity. PSS counts a page that n processes share as an n-th: it depends on the others."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:]}
    return {
        "RSS": ("MB", kilobytes["Rss"] / 1024),
        "PSS": ("MB", kilobytes["Pss"] / 1024),
        "open files": ("", process.num_fds()),
        "threads": ("", process.num_threads()),
    }


def largest(by_rank: Sequence[Caches]) -> Caches:
    """Each as it is on the rank where it has the most entries."""
    names = {name for caches in by_rank for name in caches}
    return {name: max(caches[name] for caches in by_rank if name in caches) for name in names}


class Load:
    """Clients of all kinds, drawn from a seed; what came of them."""

    def __init__(self, omni: Any, num_sizes: int, seed: int) -> None:
        self._omni = omni
        self._draw = random.Random(seed)
        self._sizes = self._draw.sample([(height, width) for height in SIDES for width in SIDES], num_sizes)
        self._alive: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        self.met: set[tuple[int, int]] = set()
        self.outcomes: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.num_held_back = 0

    async def one(self) -> None:
        """A client, from its request to its answer, or until it leaves."""
        kind = self._draw.choices(list(KINDS), list(KINDS.values()))[0]
        self._num_sent += 1
        request, stay_s = self._request(kind), self._draw.uniform(0.0, LONGEST_STAY_S)
        prompt, sampling = request.arguments()
        try:
            async with asyncio.timeout(stay_s if kind == "leaves" else None):
                async for output in self._omni.generate(prompt, sampling, request_id=f"r{self._num_sent}"):
                    width, height = output.images[0].size
            assert (height, width) == (request.height, request.width), f"{request}: {height}x{width}"
            self._ended("served", kind != "bad", str(request))
        except TimeoutError:
            self._ended("left", kind == "leaves", str(request))
        except ValueError as error:  # the client's mistake: HTTP 400
            self._ended("refused", kind == "bad", str(error))
        except Exception as error:
            self._ended("failed", kind == "bad", f"{type(error).__name__}: {error}")

    def _request(self, kind: str) -> ImageRequest:
        height, width = self._draw.choice(self._sizes)
        self.met.add((height, width))
        request = ImageRequest(
            height,
            width,
            steps=self._draw.randint(2, 6),
            seed=self._num_sent,
            negative_prompt=self._draw.choice([None, None, "blurry"]),
            prompt="a red panda " * self._draw.randint(1, 20),
        )
        return replace(request, **self._draw.choice(BAD)) if kind == "bad" else request

    def _ended(self, outcome: str, expected: bool, text: str) -> None:
        self.outcomes[outcome] += 1
        if not expected:
            self.unexpected.append(f"{outcome}: {text}")

    async def saturate(self, seconds: float) -> float:
        """Clients a second that end if there are always some waiting."""
        end_s = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end_s:
                await self.one()

        before, start_s = sum(self.outcomes.values()), time.monotonic()
        await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
        return (sum(self.outcomes.values()) - before) / (time.monotonic() - start_s)

    async def arrive(self, per_s: float, end_s: float) -> None:
        """Clients at random times, ``per_s`` on average, none while too many are there; returns when all ended."""
        while time.monotonic() < end_s:
            await asyncio.sleep(self._draw.expovariate(per_s))
            if len(self._alive) >= MAX_ALIVE:
                self.num_held_back += 1
                continue
            client = asyncio.create_task(self.one())
            self._alive.add(client)
            client.add_done_callback(self._alive.discard)
        await asyncio.gather(*self._alive)


def main() -> int:
    args = parse_args()
    report = provenance(sys.argv)
    report["settings"] = {name: value for name, value in vars(args).items() if name != "out"}
    result, sampler = measure(args)
    report |= result
    paths = write_report(args.out, args.name, report, markdown(report))
    paths.append(paths[0].with_suffix(".png"))
    plot(sampler, paths[-1])
    for path in paths:
        print(path)
    print(markdown(report))
    return 0 if is_good(report) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.9, help="share of what the server can do")
    parser.add_argument("--sizes", type=int, default=NUM_SIZES, help=f"different ones, up to {len(SIDES) ** 2}")
    parser.add_argument("--capacity-s", type=float, default=90.0, help="how long to measure what it can do")
    parser.add_argument("--sample-s", type=float, default=5.0, help="from one look to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="endurance", help="of the report's files")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if not 1 <= args.sizes <= len(SIDES) ** 2:
        parser.error(f"--sizes must be between 1 and {len(SIDES) ** 2}, got {args.sizes}")
    return args


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], Sampler]:
    prepare_cpu_process()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen-image"
        gfdit(["tiny-model", "qwen-image", str(model)])
        omni = AsyncOmni(
            model=str(model),
            enforce_eager=True,
            dtype="float32",
            engine_backend="gfdit.omni.engine.ElasticDiffusionEngine",
            worker_extension_cls="benchmarks.endurance.Extension",
            additional_config={"gfdit": {"ranks": NUM_RANKS, "threads_per_rank": 1}},
        )
        try:
            return asyncio.run(drive(omni, args))
        finally:
            omni.shutdown()


async def drive(omni: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Sampler]:
    load = Load(omni, args.sizes, args.seed)
    sampler = Sampler(omni, args.sample_s)
    await sampler.find_processes()
    run_s, start_s = 60 * args.minutes, time.monotonic()

    async def serve() -> float:
        capacity = await load.saturate(args.capacity_s)
        print(f"{capacity:.2f} clients a second at most", flush=True)
        for part in range(1, NUM_LOOKS + 1):
            await load.arrive(args.load * capacity, start_s + part / NUM_LOOKS * run_s)
            await sampler.give_back()
        return capacity

    served, samples = asyncio.create_task(serve()), asyncio.create_task(sampler.run())
    # Samples end only if a process is gone.
    await asyncio.wait([served, samples], return_when=asyncio.FIRST_COMPLETED)
    if samples.done():
        samples.result()
    capacity = await served
    samples.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await samples
    result = {
        "capacity_per_s": round(capacity, 2),
        "outcomes": dict(load.outcomes),
        "sizes_met": len(load.met),
        "unexpected": load.unexpected[:20],
        "held_back": load.num_held_back,
        "caches": grown(sampler.caches),
        "series": judge(sampler.series, run_s),
    }
    return result, sampler


def grown(caches: Sequence[Caches]) -> dict[str, tuple[int, int, int | None]]:
    """Those with more entries in the end than after a third: (then, now, limit)."""
    first, last = caches[len(caches) // 3], caches[-1]
    then = {name: first.get(name, (0, None))[0] for name in last}
    return {name: (then[name], *found) for name, found in last.items() if found[0] > then[name]}


def markdown(report: dict[str, Any]) -> str:
    settings, outcomes = report["settings"], report["outcomes"]
    ended = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    allowed = f"{MAX_GROWTH:.0%} of the mean, or {LITTLE['MB']:g} MB, or {LITTLE['']:g} of what is counted"
    lines = [
        "# What a server holds that runs for long",
        "",
        *source_lines(report),
        "",
        f"Tiny Qwen-Image on {NUM_RANKS} CPU ranks, {settings['minutes']:g} minutes, {report['sizes_met']} sizes",
        f"with sides from {SIDES[0]} to {SIDES[-1]}. It can serve {report['capacity_per_s']:g} clients a second,",
        f"and got {settings['load']:g} of that: {ended};",
        f"{len(report['unexpected'])} of them unexpectedly; {report['held_back']} were held back.",
        "",
        "Flat: over the last two thirds of the run, what a straight line through all samples gains, and what the",
        f"mean of the last third gains on that of the one before, are at most {allowed}.",
        "The RSS of workers rises and falls with what they keep of freed memory. It is to be flat with nothing",
        f"kept and no garbage, which is looked at {NUM_LOOKS} times when nothing runs, and never to be more than",
        f"{ABOVE_MB:.0f} MB above that, what is mapped and what tasks worked with: what may be kept. Not judged:",
        "what is mapped, whose pages are resident once they were touched, so that it ends at the size of that;",
        "artifacts while requests run; and PSS, which changes when others begin and end that share pages.",
        "",
        f"**{'Flat' if is_good(report) else 'Not flat, or with surprises'}.**",
        "",
        "| | mean | largest | per minute | line gains | thirds gain | allowed | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in report["series"].items():
        unit = f", {found['unit']}" if found["unit"] else ""
        numbers = [found[key] for key in ("mean", "largest", "per_minute", "by_line", "by_thirds", "allowed")]
        cells = " | ".join(f"{number:.1f}" for number in numbers)
        lines.append(f"| {name}{unit} | {cells} | {found['verdict']} |")
    lines += ["", "Caches of `functools` in workers that grew after the first third:", ""]
    lines += [f"- `{name}`: {then} to {now} of {limit}" for name, (then, now, limit) in report["caches"].items()]
    lines += [] if report["caches"] else ["- none"]
    lines += [f"- Unexpected: {text}" for text in report["unexpected"]]
    return "\n".join(lines) + "\n"


def plot(sampler: Sampler, path: Path) -> None:
    """Write a PNG: memory by process, and what is counted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = ["RSS", "in use by malloc", "kept of what was freed", WITH_NOTHING_KEPT, "threads", "open files"]
    rows = math.ceil(len(names) / 2)
    figure = Figure(figsize=(10.0, 2.7 * rows), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, quantity in zip(figure.subplots(rows, 2).flatten(), names, strict=True):
        for series in sampler.series.values():
            process, _, what = series.name.partition(": ")
            if what == quantity:
                axes.plot([at_s / 60 for at_s in series.times_s], series.values, lw=1.3, label=process)
                axes.set_ylabel(series.unit or "number", fontsize=9)
        axes.set_title(quantity, loc="left", fontsize=10.5)
        axes.set_xlabel("minutes", fontsize=9)
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    sys.exit(main())
