"""Group-free collectives between CPU ranks against gloo: the same processes, one run, alternating order.

Set-up: ``comm.group(ranks)`` against ``torch.distributed.new_group`` and the first collective, the two moments
at which a library may connect. Steady: one collective after the other on a warm group. Each rank has one torch
thread; every result is compared with gloo's. A figure of a round is that of the slowest rank.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.comm import GroupFreeComm, spawn

OURS, GLOO = "gfdit", "gloo"
WORLDS = (2, 4)
ALL_GATHER, ALL_TO_ALL, BROADCAST = "all_gather_into_tensor", "all_to_all_single", "broadcast"
KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
# The target covers these; the others are measured for information.
TARGET_OPERATIONS, TARGET_MIN_BYTES = (ALL_GATHER, ALL_TO_ALL), 64 * KIB
TARGET_SETUP_RATIO, TARGET_STEADY_RATIO = 1000, 1.0
# Repetitions of one measurement: as many as fit in this many bytes, within limits.
VOLUME_BYTES, MIN_REPEATS, MAX_REPEATS = 64 * MIB, 5, 400
GROUPS_PER_ROUND, GLOO_GROUPS_PER_ROUND = 200, 5
WARM_UP = 3
# torch 2.13 renamed it, and the old name warns.
gloo_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True)
class Case:
    """``num_bytes``: of the output tensor of a rank."""

    operation: str
    num_bytes: int

    @property
    def has_target(self) -> bool:
        return self.operation in TARGET_OPERATIONS and self.num_bytes >= TARGET_MIN_BYTES


@dataclass(frozen=True, slots=True)
class Setup:
    """Seconds of one round: making a group, and making one plus the first collective on it."""

    make_s: float
    make_and_use_s: float


@dataclass(frozen=True, slots=True)
class RankResult:
    """By library and round; ``steady_s`` also by case, seconds per collective."""

    setup: dict[str, list[Setup]]
    steady_s: dict[str, dict[Case, list[float]]]


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    cases = [Case(op, size) for op in (ALL_GATHER, ALL_TO_ALL, BROADCAST) for size in SIZES]
    if args.quick:
        cases = [case for case in cases if case.num_bytes in (4 * KIB, 64 * KIB, MIB)]
    load_average, worlds = os.getloadavg()[0], []
    for num_ranks in WORLDS:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        by_rank = spawn(measure, num_ranks, args=(store.port, cases, args.rounds), timeout_s=3600)
        worlds.append(summarize(num_ranks, cases, by_rank))
        print(f"{num_ranks} ranks: measured", flush=True)
    report = source | {"load_average_before": load_average, "rounds": args.rounds, "worlds": worlds}
    for path in write_report(args.out, "comm_cpu", report, markdown(report)):
        print(path)
    print("\n".join(headlines(report)))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="each measures everything once")
    parser.add_argument("--quick", action="store_true", help="three rounds of three sizes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if args.quick:
        args.rounds = 3
    return args


def measure(comm: GroupFreeComm, store_port: int, cases: Sequence[Case], rounds: int) -> RankResult:
    """Runs in every rank."""
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    try:
        setup: dict[str, list[Setup]] = {OURS: [], GLOO: []}
        steady_s: dict[str, dict[Case, list[float]]] = {name: {case: [] for case in cases} for name in setup}
        for number in range(rounds):
            for name in in_turn(number):
                setup[name].append({OURS: set_up_ours, GLOO: set_up_gloo}[name](comm))
            for index, case in enumerate(cases):
                calls = make_calls(comm, case, seed=number)
                for name in in_turn(number + index):
                    steady_s[name][case].append(time_steady(calls[name], case))
        return RankResult(setup, steady_s)
    finally:
        dist.destroy_process_group()


def in_turn(number: int) -> tuple[str, str]:
    return (GLOO, OURS) if number % 2 else (OURS, GLOO)


def set_up_ours(comm: GroupFreeComm) -> Setup:
    ranks = tuple(range(comm.world_size))
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(GROUPS_PER_ROUND):
        comm.group(ranks)
    make_s = (time.perf_counter() - begin) / GROUPS_PER_ROUND
    x, out = small_tensors(comm)
    uses_s = []
    for _ in range(GROUPS_PER_ROUND):
        dist.barrier()
        begin = time.perf_counter()
        comm.all_gather_into_tensor(out, x, comm.group(ranks))
        uses_s.append(time.perf_counter() - begin)
    return Setup(make_s, statistics.median(uses_s))


def set_up_gloo(comm: GroupFreeComm) -> Setup:
    ranks = list(range(comm.world_size))
    x, out = small_tensors(comm)
    makes_s, uses_s = [], []
    for _ in range(GLOO_GROUPS_PER_ROUND):
        dist.barrier()
        begin = time.perf_counter()
        group = dist.new_group(ranks)
        makes_s.append(time.perf_counter() - begin)
        gloo_all_gather(out, x, group=group)
        uses_s.append(time.perf_counter() - begin)
        dist.destroy_process_group(group)
    return Setup(statistics.median(makes_s), statistics.median(uses_s))


def small_tensors(comm: GroupFreeComm) -> tuple[torch.Tensor, torch.Tensor]:
    size = 4 * KIB // comm.world_size
    return torch.zeros(size, dtype=torch.uint8), torch.empty(size * comm.world_size, dtype=torch.uint8)


def make_calls(comm: GroupFreeComm, case: Case, seed: int) -> dict[str, Callable[[], object]]:
    """The collective in both libraries, on the same input; their results were compared."""
    group = comm.group(range(comm.world_size))
    generator = torch.Generator().manual_seed(seed * comm.world_size + comm.rank)
    num_in = case.num_bytes // comm.world_size if case.operation == ALL_GATHER else case.num_bytes
    x = torch.randint(0, 256, (num_in,), dtype=torch.uint8, generator=generator)
    outs = {name: torch.zeros(case.num_bytes, dtype=torch.uint8) for name in (OURS, GLOO)}
    ours, theirs = outs[OURS], outs[GLOO]
    calls: dict[str, Callable[[], object]]
    if case.operation == ALL_GATHER:
        calls = {
            OURS: lambda: comm.all_gather_into_tensor(ours, x, group),
            GLOO: lambda: gloo_all_gather(theirs, x),
        }
    elif case.operation == ALL_TO_ALL:
        calls = {
            OURS: lambda: comm.all_to_all_single(ours, x, group),
            GLOO: lambda: dist.all_to_all_single(theirs, x),
        }
    else:
        if comm.rank == 0:
            ours.copy_(x)
            theirs.copy_(x)
        calls = {
            OURS: lambda: comm.broadcast(ours, 0, group),
            GLOO: lambda: dist.broadcast(theirs, 0),
        }
    for call in calls.values():
        call()
    if not torch.equal(ours, theirs):
        raise RuntimeError(f"rank {comm.rank}: the result of {case} differs from gloo's")
    return calls


def time_steady(call: Callable[[], object], case: Case) -> float:
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, VOLUME_BYTES // case.num_bytes))
    for _ in range(WARM_UP):
        call()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def summarize(num_ranks: int, cases: Sequence[Case], by_rank: Sequence[RankResult]) -> dict[str, Any]:
    """Times in us. A round's figure is the slowest rank's; ``ratio`` is gloo's over ours, round by round."""
    setup = {
        name: {
            part: slowest([[getattr(round_, part) for round_ in result.setup[name]] for result in by_rank])
            for part in ("make_s", "make_and_use_s")
        }
        for name in (OURS, GLOO)
    }
    steady = []
    for case in cases:
        ours, gloo = (slowest([result.steady_s[name][case] for result in by_rank]) for name in (OURS, GLOO))
        entry: dict[str, Any] = {
            "operation": case.operation,
            "bytes": case.num_bytes,
            "has_target": case.has_target,
        }
        steady.append(entry | compare(ours, gloo))
    return {
        "ranks": num_ranks,
        "setup": compare(setup[OURS]["make_s"], setup[GLOO]["make_and_use_s"]),
        "make": compare(setup[OURS]["make_s"], setup[GLOO]["make_s"]),
        "make_and_use": compare(setup[OURS]["make_and_use_s"], setup[GLOO]["make_and_use_s"]),
        "steady": steady,
    }


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*by_rank, strict=True)]


def compare(ours_s: Sequence[float], gloo_s: Sequence[float]) -> dict[str, Any]:
    ratios = [gloo / ours for ours, gloo in zip(ours_s, gloo_s, strict=True)]
    return {
        f"{OURS}_us": spread([1e6 * seconds for seconds in ours_s]),
        f"{GLOO}_us": spread([1e6 * seconds for seconds in gloo_s]),
        "ratio": spread(ratios),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def headlines(report: dict[str, Any]) -> list[str]:
    lines = []
    for world in report["worlds"]:
        ratio = world["setup"]["ratio"]["median"]
        verdict = "reached" if ratio >= TARGET_SETUP_RATIO else "missed"
        aimed = [entry for entry in world["steady"] if entry["has_target"]]
        missed = [entry for entry in aimed if entry["ratio"]["median"] < TARGET_STEADY_RATIO]
        worst = min(aimed, key=lambda entry: entry["ratio"]["median"])
        names = "; ".join(f"{e['operation']} {size_name(e['bytes'])}: {e['ratio']['median']:.2f}" for e in missed)
        lines += [
            f"{world['ranks']} ranks, set-up: {ratio:,.0f} x cheaper than gloo's "
            f"(target {TARGET_SETUP_RATIO:,} x: {verdict})",
            f"{world['ranks']} ranks, steady: gloo takes at least {worst['ratio']['median']:.2f} x our time "
            f"in {len(aimed)} cases (target: never slower; {f'missed: {names}' if missed else 'reached'})",
        ]
    return lines


def size_name(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Collectives between CPU ranks: gfdit against gloo",
        "",
        *(f"- {line}" for line in headlines(report)),
        "",
        *source_lines(report, f"load average before: {report['load_average_before']:.1f}"),
        f"- {report['rounds']} rounds in the same processes, which library goes first alternates; one torch "
        "thread per rank; a round's figure is the slowest rank's; results compared with gloo's in every round",
        "- Figures are medians over the rounds, in brackets the smallest and the largest; a ratio is gloo's time "
        "over ours, round by round, so more than 1 means that ours is faster",
    ]
    for world in report["worlds"]:
        lines += ["", f"## {world['ranks']} ranks", *setup_table(world), *steady_table(world)]
    lines += [
        "",
        "Bytes are those of a rank's output tensor. Broadcasts follow each other without waiting for the last "
        "receiver, in both libraries. With more ranks than cores, ranks wait for a core as much as for each "
        "other. None of this foretells anything about GPUs.",
    ]
    return "\n".join(lines) + "\n"


def setup_table(world: dict[str, Any]) -> list[str]:
    rows = [
        ("`comm.group` / `new_group` + first collective", "setup", f"{TARGET_SETUP_RATIO:,}"),
        ("`comm.group` / `new_group` alone", "make", ""),
        ("both with a first all-gather of 4 KiB", "make_and_use", ""),
    ]
    head = ["", "| group set-up | gfdit (us) | gloo (us) | ratio | target |", "|---|---|---|---|---|"]
    return head + [f"| {title} | {figures(world[key])} | {target} |" for title, key, target in rows]


def steady_table(world: dict[str, Any]) -> list[str]:
    head = ["", "| steady | bytes | gfdit (us) | gloo (us) | ratio | target |", "|---|---|---|---|---|---|"]
    return head + [
        f"| {entry['operation']} | {size_name(entry['bytes'])} | {figures(entry)} | "
        f"{'1' if entry['has_target'] else ''} |"
        for entry in world["steady"]
    ]


def figures(entry: dict[str, Any]) -> str:
    return " | ".join(
        f"{values['median']:,.{digits}f} ({values['min']:,.{digits}f} to {values['max']:,.{digits}f})"
        for values, digits in ((entry[f"{OURS}_us"], 1), (entry[f"{GLOO}_us"], 1), (entry["ratio"], 2))
    )


if __name__ == "__main__":
    sys.exit(main())
