"""The exact optimum of small instances: equal to exhaustive search, above every policy, below the bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from gfdit.core.policy.loading import known_policies, load_policy
from gfdit.sim.bounds.exact import optimal_num_met
from gfdit.sim.bounds.fluid import attainment_bound
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulationOptions, Simulator
from gfdit.sim.trace import TraceRequest
from tests.sim.tables import DECODE_S, ENCODE_S, PREPARE_S, STEP_S, line, table

UNIT_S = 0.25  # divides every time of the table
Modes = tuple[tuple[int, int], ...]  # (slots, ranks)


def instance(seed: int, *, most_requests: int, most_steps: int) -> list[TraceRequest]:
    draw = random.Random(seed)
    arrival_s, trace = 0.0, []
    for index in range(draw.randint(2, most_requests)):
        steps = draw.randint(1, most_steps)
        alone_s = ENCODE_S + PREPARE_S + steps * STEP_S[1] + DECODE_S
        deadline_s = round(draw.uniform(0.7, 2.0) * alone_s, 2)
        trace.append(line(f"r{index}", arrival_s, num_steps=steps, deadline_s=deadline_s))
        arrival_s += draw.choice((0.0, 0.25, 1.0, 2.0))
    return trace


def exhaustive(trace: Sequence[TraceRequest], num_ranks: int) -> int:
    """The largest subset for which trying every start of every task finds a schedule in time."""
    for size in range(len(trace), 0, -1):
        if any(in_time(chosen, num_ranks) for chosen in combinations(trace, size)):
            return size
    return 0


def in_time(requests: Sequence[TraceRequest], num_ranks: int) -> bool:
    def slots(time_s: float) -> int:
        return round(time_s / UNIT_S)

    steps = tuple((slots(time_s), sp) for sp, time_s in STEP_S.items() if sp <= num_ranks)
    work: list[list[Modes]] = [
        [((slots(ENCODE_S), 1),), ((slots(PREPARE_S), 1),), *[steps] * r.num_steps, ((slots(DECODE_S), 1),)]
        for r in requests
    ]
    latest = [int((r.arrival_s + (r.deadline_s or 0.0)) / UNIT_S) for r in requests]
    left = [[sum(min(modes)[0] for modes in tasks[done:]) for done in range(len(tasks) + 1)] for tasks in work]

    @cache
    def from_here(now: int, done: tuple[int, ...], until: tuple[int, ...], held: tuple[int, ...]) -> bool:
        """``until`` is when the task of each request ends, ``held`` its ranks; or when it can start, and 0."""
        if all(count == len(tasks) for count, tasks in zip(done, work, strict=True)):
            return True
        for index, count in enumerate(done):
            start = max(now, until[index]) if left[index][count] else until[index]
            if start + left[index][count] > latest[index]:
                return False
        held = tuple(ranks if end > now else 0 for ranks, end in zip(held, until, strict=True))
        for index, count in enumerate(done):
            if until[index] <= now and count < len(work[index]):
                for time, ranks in work[index][count]:
                    if sum(held) + ranks <= num_ranks and from_here(
                        now,
                        put(done, index, count + 1),
                        put(until, index, now + time),
                        put(held, index, ranks),
                    ):
                        return True
        later = [end for end in until if end > now]
        return bool(later) and from_here(min(later), done, until, held)

    arrivals = tuple(slots(request.arrival_s) for request in requests)
    return from_here(0, (0,) * len(requests), arrivals, (0,) * len(requests))


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def test_exhaustive_search_finds_no_other() -> None:
    for seed in range(5):
        trace = instance(seed, most_requests=3, most_steps=2)
        for num_ranks in (1, 2, 4):
            assert optimal_num_met(trace, table(), num_ranks=num_ranks) == exhaustive(trace, num_ranks), seed


def test_policies_below_it_and_the_bound_above() -> None:
    beaten_on_fewer_ranks = 0
    for seed in range(3):
        trace, num_ranks = instance(100 + seed, most_requests=4, most_steps=3), 2 + 2 * (seed % 2)
        best = optimal_num_met(trace, table(), num_ranks=num_ranks)
        assert best <= attainment_bound(trace, table(), num_ranks=num_ranks).num_met
        fewer = optimal_num_met(trace, table(), num_ranks=num_ranks // 2)
        for policy in known_policies():
            run = Simulator(load_policy(policy, {}), table(), trace, SimulationOptions(num_ranks)).run()
            met = round(summarize(run)["slo_attainment"] * len(trace))
            assert met <= best, (seed, policy)
            beaten_on_fewer_ranks += met > fewer
    # Negative control: the optimum of half the ranks is not above them.
    assert beaten_on_fewer_ranks


def test_what_has_no_deadline_is_always_met() -> None:
    trace = [line("a"), line("b", deadline_s=0.1)]
    assert optimal_num_met(trace, table(), num_ranks=1) == 1
    assert optimal_num_met(trace[:1], table(), num_ranks=1) == 1


def test_instances_it_cannot_solve_are_refused() -> None:
    uneven = table({1: 2.000001})
    trace = [line(f"r{i}", deadline_s=60.0) for i in range(3)]
    with pytest.raises(ValueError, match="too large for an exact optimum"):
        optimal_num_met(trace, uneven, num_ranks=1)
    batched = replace(uneven, entries=tuple(replace(entry, batch=2) for entry in uneven.entries))
    with pytest.raises(ValueError, match="does not know batches"):
        optimal_num_met(trace, batched, num_ranks=1)
