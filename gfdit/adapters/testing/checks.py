"""What must hold of every adapter, as checks that say what they measured.

The pipeline is its own reference: nothing here knows a model. Layouts are random but seeded, so a failure names a
script that shows it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gfdit.adapters.testing.batches import check_batch_spread, check_batched
from gfdit.adapters.testing.bench import Bench, CheckFailed, expect_same
from gfdit.adapters.testing.kit import AdapterKit
from gfdit.adapters.testing.processes import ChildError
from gfdit.adapters.testing.requests import KitRequest
from gfdit.adapters.testing.spread import check_spread
from gfdit.core.layouts import SINGLE, ParallelSpec

#: Between layouts, for float32 outputs of magnitude 1: sums in another order, accumulated over the steps.
TOLERANCE = 1e-4
# How much further apart the outputs of different requests must be than the tolerance, to tell anything.
_CONTRAST = 100


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``figure`` says what was measured, or what is wrong."""

    name: str
    passed: bool
    figure: str

    def __str__(self) -> str:
        return f"{self.name:<12} {'ok  ' if self.passed else 'FAIL'} {self.figure}"


@dataclass(slots=True)
class Report:
    """One line per check."""

    results: list[CheckResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results)

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))


def check_stock(bench: Bench) -> str:
    """The reference is worth something: it repeats itself, is finite, and tells requests apart."""
    again = bench.kit.stock(list(reversed(bench.requests)))[::-1]
    contrast = float("inf")
    for (request, stock), repeated in zip(bench.each(), again, strict=True):
        expect_same(repeated, stock, f"stock, a second time: {request}")
        if not stock.finite:
            raise CheckFailed(f"stock returns what is not a number: {request}")
        (other,) = bench.kit.stock([request.but(seed=request.seed + 1000)])
        contrast = min(contrast, other.difference(stock))
    if contrast < _CONTRAST * bench.tolerance:
        raise CheckFailed(f"requests with different seeds differ by {contrast:.2g}: too little to see errors by")
    spread = min(stock.spread for stock in bench.stock)
    return f"repeats itself; standard deviation {spread:.2g}, another seed differs by {contrast:.2g}"


def check_sp1(bench: Bench) -> str:
    """On one rank, another one for each task: bit-identical to stock."""
    for request, stock in bench.each():
        script = bench.rotating_script(request)
        expect_same(bench.kit.run(request, script), stock, f"{request} under {script!r}")
    return f"{len(bench.requests)} requests bit-identical to stock on changing ranks"


def check_fresh(bench: Bench) -> str:
    """A task needs nothing but its inputs: not what earlier tasks left on the pipeline, nor what others did."""
    for request, stock in bench.each():
        script = bench.rotating_script(request)
        output = bench.kit.run(request, script, fresh=True)
        expect_same(output, stock, f"{request} under {script!r}, on ranks that have seen no request")
        script = bench.changing_script(request)
        output = bench.kit.run(request, script, fresh=True)
        expect_same(output, bench.alone(request, script), f"{request} under {script!r}, on ranks that have")
    return f"{len(bench.requests)} requests on ranks as they were loaded, for each task"


def check_layouts(bench: Bench) -> str:
    """Layouts that change at every step: near stock, and the same bits every time."""
    worst = 0.0
    seen: set[ParallelSpec] = set()
    for request, stock in bench.each():
        seen.update(bench.specs(request))
        for number in range(bench.num_scripts):
            script = bench.changing_script(request, number)
            output = bench.alone(request, script)
            worst = max(worst, bench.expect_near(output, stock, f"{request} under {script!r}"))
            expect_same(bench.kit.run(request, script), output, f"repeated: {request} under {script!r}")
    if seen == {SINGLE}:
        return "only sp1 is possible: nothing to change"
    specs = ", ".join(map(str, sorted(seen, key=lambda spec: (spec.size, spec.cfg))))
    return f"differs from stock by at most {worst:.2g} under {specs}; repeatable"


def check_interleaved(bench: Bench) -> str:
    """Requests in turns on the same ranks are the requests alone."""
    pairs = [(request, bench.changing_script(request)) for request in _in_company(bench.requests)]
    together = bench.kit.run_interleaved(pairs)
    for (request, script), output in zip(pairs, together, strict=True):
        expect_same(output, bench.alone(request, script), f"among others: {request} under {script!r}")
    return f"{len(pairs)} requests in turns are bit-identical to each alone"


def check_migration(bench: Bench) -> str:
    """Every artifact survives a move and the way back; no task changes its inputs, and each can run again."""
    for request, stock in bench.each():
        script = bench.rotating_script(request)
        output, faults = bench.kit.audit(request, script)
        if faults:
            raise CheckFailed(f"{request} under {script!r}: {faults[0]} ({len(faults)} in all)")
        expect_same(output, stock, f"{request} under {script!r}, artifacts moved about")
        script = bench.changing_script(request)
        _, faults = bench.kit.audit(request, script)
        if faults:
            raise CheckFailed(f"{request} under {script!r}: {faults[0]} ({len(faults)} in all)")
    if any(bench.kit.held()):
        raise CheckFailed("artifacts are left on ranks after the requests")
    sizes = bench.kit.artifact_bytes(bench.requests[0])
    total = sum(sum(part) for part in sizes["denoise"].values())
    return f"artifacts come back bit-identical, tasks can run again; {total / 1e3:.0f} kB between steps"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "stock": check_stock,
    "sp1": check_sp1,
    "fresh": check_fresh,
    "layouts": check_layouts,
    "interleaved": check_interleaved,
    "batched": check_batched,
    "migration": check_migration,
    "spread": check_spread,
    "batch-spread": check_batch_spread,
}
# The first two hold outputs against a tolerance that is for float32; in another type the others take their places.
_ROUNDING = ("layouts", "batched")
_SPREAD = ("spread", "batch-spread")


def usual_checks(dtype: str) -> tuple[str, ...]:
    """What is run of :data:`CHECKS` unless said otherwise, for a kit of ``dtype``."""
    left_out = _SPREAD if dtype == "float32" else _ROUNDING
    return tuple(name for name in CHECKS if name not in left_out)


def check_adapter(
    kit: AdapterKit,
    requests: Sequence[KitRequest],
    *,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    num_scripts: int = 2,
    checks: Sequence[str] | None = None,
) -> Report:
    """Run ``checks`` on what ``kit`` holds; ``num_scripts`` random scripts per request where layouts change.

    None are the usual ones for the kit's dtype: those with a tolerance in float32, in other types those that
    measure by stock instead.

    ``tolerance`` is in the unit of the pipeline's output. Choose requests that differ: guided and not, sizes that
    do and do not divide by the degrees, several images. A check that fails does not keep the others from running.
    Raises ``ValueError`` for a check that does not exist.
    """
    checks = usual_checks(kit.dtype) if checks is None else checks
    if unknown := [name for name in checks if name not in CHECKS]:
        raise ValueError(f"there is no check {unknown[0]!r}; known: {', '.join(CHECKS)}")
    report = Report()
    try:
        stock = kit.stock(requests)
    except ChildError as error:
        report.results.append(CheckResult("stock", False, str(error)))
        return report
    bench = Bench(kit, requests, tolerance, seed, num_scripts, stock)
    for name in checks:
        try:
            report.results.append(CheckResult(name, True, CHECKS[name](bench)))
        except (CheckFailed, ChildError) as error:
            report.results.append(CheckResult(name, False, str(error)))
    return report


def _in_company(requests: Sequence[KitRequest]) -> list[KitRequest]:
    """At least two, which differ."""
    return list(requests) if len(requests) > 1 else [requests[0], requests[0].but(seed=requests[0].seed + 1)]
