"""What must hold of the models of a workflow, as checks that say what they measured.

The workflow on one rank is its own reference: that it makes the right image is for its author to compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gfdit.adapters.testing.bench import CheckFailed
from gfdit.adapters.testing.checks import TOLERANCE, CheckResult, Report
from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.processes import ChildError
from gfdit.adapters.testing.workflow_run import (
    Outcome,
    WorkflowRequest,
    candidates,
    run,
    run_between_unloads,
    run_in_turns,
)
from gfdit.core.layouts import SINGLE, ParallelSpec

_LEFT_BYTES = 2**18
_CONTRAST = 100  # how much more than the tolerance another seed must change


@dataclass
class WorkflowBench:
    """``requests`` on ``num_ranks`` ranks, and what each makes on one of them."""

    ranks: ComponentRanks
    num_ranks: int
    requests: Sequence[WorkflowRequest]
    tolerance: float = TOLERANCE
    seed: int = 0
    alone: list[Outcome] = field(default_factory=list)

    def all_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.call_all(range(self.num_ranks), fn, *args)

    def degrees(self, request: WorkflowRequest) -> list[ParallelSpec]:
        """Those whose ranks divide all there are."""
        found = self.ranks.call(candidates, request, self.num_ranks)
        return [spec for spec in found if self.num_ranks % spec.size == 0]

    def near(self, request: WorkflowRequest, reference: Outcome, specs: Sequence[ParallelSpec]) -> float:
        outcomes = self.all_ranks(run, request, tuple(specs))
        worst = max(_difference(outcome, reference) for outcome in outcomes)
        if not worst <= self.tolerance:
            words = " ".join(map(str, specs))
            raise CheckFailed(f"{request} under {words} differs from one rank by {worst:.2g}")
        again = self.all_ranks(run, request, tuple(specs))
        _expect_same(again, outcomes, f"{request} under {' '.join(map(str, specs))}, a second time")
        return worst


def check_alone(bench: WorkflowBench) -> str:
    """A request repeats itself, on every rank, and another seed makes something else."""
    contrast = float("inf")
    for request, reference in zip(bench.requests, bench.alone, strict=True):
        found = bench.all_ranks(run, request)
        _expect_same(found, [reference] * bench.num_ranks, f"{request}, on each rank")
        if not torch.isfinite(reference.output).all():
            raise CheckFailed(f"{request} makes what is not a number")
        if "seed" in request.values:
            other = WorkflowRequest(
                request.file,
                request.name,
                {**request.values, "seed": request.values["seed"] + 1000},
                request.steps,
            )
            contrast = min(contrast, _difference(bench.ranks.call(run, other), reference))
    if contrast < _CONTRAST * bench.tolerance:
        raise CheckFailed(f"requests with different seeds differ by {contrast:.2g}: too little to see errors by")
    return (
        f"{len(bench.requests)} requests repeat themselves on every rank, another seed differs by {contrast:.2g}"
    )


def check_degrees(bench: WorkflowBench) -> str:
    """Every degree that the models offer, throughout and changing from step to step, is near one rank."""
    worst, seen = 0.0, set()
    draw = random.Random(bench.seed)
    for request, reference in zip(bench.requests, bench.alone, strict=True):
        degrees = bench.degrees(request)
        seen.update(degrees)
        for spec in degrees:
            worst = max(worst, bench.near(request, reference, [spec]))
        if len(degrees) > 1:
            worst = max(worst, bench.near(request, reference, [draw.choice(degrees) for _ in range(7)]))
            worst = max(worst, bench.near(request, reference, degrees))
    if seen <= {SINGLE}:
        return "only sp1 is possible: nothing to change"
    names = ", ".join(map(str, sorted(seen, key=lambda spec: (spec.size, spec.cfg))))
    return f"differs from one rank by at most {worst:.2g} under {names}; repeatable"


def check_interleaved(bench: WorkflowBench) -> str:
    """Requests in turns, a model call of each after the other, are each alone, at the widest degree too."""
    together = bench.ranks.call(run_in_turns, bench.requests)
    _expect_same(together, bench.alone, "in turns")
    common = set.intersection(*(set(bench.degrees(request)) for request in bench.requests))
    widest = max(common, key=lambda spec: (spec.size, spec.cfg), default=SINGLE)
    alone = [bench.all_ranks(run, request, (widest,))[0] for request in bench.requests]
    _expect_same(bench.all_ranks(run_in_turns, bench.requests, (widest,))[0], alone, f"in turns under {widest}")
    return f"{len(together)} requests in turns are bit-identical to each alone, also under {widest}"


def check_audit(bench: WorkflowBench) -> str:
    """No model changes its inputs, each can run again, and what they make survives a move."""
    for request, reference in zip(bench.requests, bench.alone, strict=True):
        outcome = bench.ranks.call(run, request, (), True)
        if outcome.faults:
            raise CheckFailed(f"{request}: {outcome.faults[0]} ({len(outcome.faults)} in all)")
        _expect_same([outcome], [reference], f"{request} with artifacts moved about")
    return "inputs stay as they are, calls can be repeated, artifacts moved"


def check_reload(bench: WorkflowBench) -> str:
    """What is unloaded and loaded again makes the same, and leaves nothing behind."""
    most = 0
    for request, reference in zip(bench.requests, bench.alone, strict=True):
        made, num_bytes = bench.ranks.call(run_between_unloads, request)
        _expect_same([made], [reference], f"{request}, loaded again")
        if num_bytes > _LEFT_BYTES:
            raise CheckFailed(f"{request}: {num_bytes / 2**20:.1f} MiB of tensors are left when all is unloaded")
        most = max(most, num_bytes)
    return f"components that were unloaded and loaded again make the same; at most {most} bytes are left"


WORKFLOW_CHECKS: dict[str, Callable[[WorkflowBench], str]] = {
    "alone": check_alone,
    "degrees": check_degrees,
    "interleaved": check_interleaved,
    "audit": check_audit,
    "reload": check_reload,
}


def check_workflows(
    ranks: ComponentRanks,
    num_ranks: int,
    requests: Sequence[WorkflowRequest],
    *,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    checks: Sequence[str] | None = None,
) -> Report:
    """Runs :data:`WORKFLOW_CHECKS`, or some of them, with ``requests`` of one or several workflows.

    ``tolerance`` is between degrees, for float32 outputs of magnitude 1. Raises ``ValueError`` for a check that
    there is not, and :class:`ChildError` if a rank cannot even run the first request.
    """
    names = tuple(WORKFLOW_CHECKS) if checks is None else tuple(checks)
    if unknown := set(names) - WORKFLOW_CHECKS.keys():
        raise ValueError(f"there is no check {min(unknown)!r}, checks: {', '.join(WORKFLOW_CHECKS)}")
    bench = WorkflowBench(ranks, num_ranks, requests, tolerance, seed)
    bench.alone = [ranks.call(run, request) for request in requests]
    report = Report()
    for name in names:
        check = partial(WORKFLOW_CHECKS[name], bench)
        try:
            report.results.append(CheckResult(name, True, check()))
        except CheckFailed as failure:
            report.results.append(CheckResult(name, False, str(failure)))
        except ChildError as error:  # ranks that failed together are of no more use
            report.results.append(CheckResult(name, False, str(error).strip().splitlines()[-1]))
            break
    return report


def _difference(one: Outcome, other: Outcome) -> float:
    if one.output.shape != other.output.shape:
        return float("inf")
    return float((one.output - other.output).abs().max())


def _expect_same(found: Sequence[Outcome], expected: Sequence[Outcome], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        if not torch.equal(one.output, other.output):
            raise CheckFailed(f"{what}: differs by {_difference(one, other):.2g}")
