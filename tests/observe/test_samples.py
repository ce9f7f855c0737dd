"""Samples from the entries of a recording, checked against times that were made up."""

from __future__ import annotations

import random

import pytest

from gfdit.core import ExecutionLayout, ParallelSpec, Request, Shape, TaskKind, trajectory
from gfdit.core.artifacts.transfers import Transfer
from gfdit.core.commands import CompleteRequest, Migrate, RunTask
from gfdit.core.cost.table import CostKey
from gfdit.core.events import Event, MigrationFinished, RequestArrived, TaskFailed, TaskFinished
from gfdit.observe.recording import TimedEvent
from gfdit.observe.samples import UNLIMITED, Samples, median_error

SPECS = (ParallelSpec(1), ParallelSpec(2))
PAIR = ExecutionLayout((1, 0), ParallelSpec(2))
REQUEST = Request("r", "m", Shape(64, 64), 2, 0.0)
GRAPH = trajectory("r", 2, SPECS)
STEP = GRAPH.tasks[2]


def at(now_s: float, event: Event) -> TimedEvent:
    return TimedEvent(event, now_s)


def test_a_dispatch_takes_as_long_as_its_slowest_rank() -> None:
    samples = Samples()
    samples.add([at(1.0, RequestArrived(REQUEST, GRAPH)), RunTask(7, (STEP,), PAIR)])
    samples.add([at(1.30, TaskFinished(7, 0, 0.2)), at(1.32, TaskFinished(7, 1, 0.3)), CompleteRequest("r")])
    key = CostKey("m", TaskKind.DENOISE, Shape(64, 64), False, ParallelSpec(2), 1)
    assert samples.task_s == {key: [0.3]}
    assert samples.dispatch_latency_s() == pytest.approx(0.02)
    assert samples.completed == {"r"}


def test_a_batch_is_a_key_of_its_own_and_a_failure_leaves_no_sample() -> None:
    samples = Samples()
    samples.add([at(1.0, RequestArrived(REQUEST, GRAPH)), RunTask(7, (STEP, GRAPH.tasks[3]), PAIR)])
    samples.add([at(2.0, TaskFailed(7, 1, "no")), at(2.0, TaskFinished(7, 0, 0.5)), RunTask(8, (STEP,) * 2, PAIR)])
    samples.add([at(3.0, TaskFinished(8, 0, 0.5)), at(3.0, TaskFinished(8, 1, 0.4))])
    assert [(key.batch, values) for key, values in samples.task_s.items()] == [(2, [0.5])]


def test_what_waits_for_a_copy_says_nothing_about_dispatching() -> None:
    move = copy_of("r", 3)
    samples = Samples()
    samples.add([at(1.0, RequestArrived(REQUEST, GRAPH)), move, RunTask(7, (STEP,), PAIR, (move,))])
    samples.add([at(1.1, MigrationFinished(3, 1, 0.02, 800)), at(1.1, MigrationFinished(3, 0, 0.01, 800))])
    samples.add([at(2.0, TaskFinished(7, 0, 0.5)), at(2.0, TaskFinished(7, 1, 0.4))])
    assert not samples.overhead_s
    (copy,) = samples.copies
    assert (copy.kind, copy.num_bytes, copy.seconds) == ("latents", 800, 0.02)


def copy_of(request_id: str, number: int) -> Migrate:
    """From rank 0 to rank 1."""
    alone = ExecutionLayout((1,))
    return Migrate(number, request_id, f"{request_id}/latents/0", (0, 1), (Transfer(0, (1,)),), alone)


def test_what_waits_for_another_task_says_nothing_about_dispatching() -> None:
    samples = Samples()
    samples.add([at(1.0, RequestArrived(REQUEST, GRAPH)), RunTask(7, (STEP,), PAIR, after=6)])
    samples.add([at(2.0, TaskFinished(7, 0, 0.5)), at(2.0, TaskFinished(7, 1, 0.5))])
    assert list(samples.task_s.values()) == [[0.5]] and samples.overhead_s == []


def copies(latency_s: float, bytes_per_s: float, scatter: float) -> Samples:
    draw = random.Random(1)
    samples = Samples()
    number = 0
    for side in (64, 128, 256):
        request = Request(f"r{side}", "m", Shape(side, side), 1, 0.0)
        samples.add([at(0.0, RequestArrived(request, trajectory(request.id, 1, SPECS)))])
        for _ in range(20):
            number += 1
            num_bytes = side * side * 100
            seconds = (latency_s + num_bytes / bytes_per_s) * draw.uniform(1 - scatter, 1 + scatter)
            move = copy_of(request.id, number)
            ends = [at(0.0, MigrationFinished(number, rank, seconds, num_bytes)) for rank in (0, 1)]
            samples.add([move, *ends])
    return samples


def test_the_cost_of_a_copy_is_a_line_in_its_size() -> None:
    latency_s, bytes_per_s = copies(0.001, 1e9, scatter=0.01).copy_cost()
    assert latency_s == pytest.approx(0.001, rel=0.05)
    assert bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_rate_that_does_not_show_is_not_made_up() -> None:
    latency_s, bytes_per_s = copies(0.001, 1e12, scatter=0.5).copy_cost()
    assert bytes_per_s == UNLIMITED
    assert latency_s == pytest.approx(0.001, rel=0.3)


def test_jitter_is_the_relative_scatter_of_steps() -> None:
    draw = random.Random(2)
    key = CostKey("m", TaskKind.DENOISE, Shape(64, 64), False, ParallelSpec(1), 1)
    samples = Samples({key: [2.0 * draw.lognormvariate(0, 0.05) for _ in range(400)] + [50.0]})
    assert samples.jitter() == pytest.approx(0.05, rel=0.15)


def test_the_error_of_a_median_falls_with_its_square_root_and_ignores_an_outlier() -> None:
    draw = random.Random(3)
    values = [draw.gauss(10.0, 0.5) for _ in range(400)]
    assert median_error(values) == pytest.approx(1.2533 * 0.05 / 20, rel=0.2)
    assert median_error([*values, 1e6]) == pytest.approx(median_error(values), rel=0.05)
    assert median_error(values[:100]) > 1.5 * median_error(values)
    assert median_error([1.0]) == float("inf")
    assert median_error([2.0, 2.0]) == 0
