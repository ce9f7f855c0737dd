"""What the default policy is meant to show, beside what it does."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from benchmarks.policy_reports.claims import ADMISSION, Claim, Verdict
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.sim.bounds.possible import SIDES
from gfdit.sim.sweep import BOUND, Point, Sweep

DEFAULT = DEFAULT_POLICY
IMPROVED = "tetriserve, improved"  # with what is not in its paper
FAST = ("edf", "srtf", "tetriserve", IMPROVED)  # whose mean latency is the measure
MAX_LOSS, LEAD = 0.005, 0.10
MAX_MEAN, MAX_SLOWER = 1.05, 0.05
MAX_LATEST = 1.25
MAX_GAP, MAX_GAP_OF = 0.03, {"flux": 0.08}  # its largest images take all ranks at once for most of their deadline
OVERLOAD = 0.9
NAMED = 8  # exceptions that are named


@dataclass(frozen=True)
class Targets:
    """Sweeps with :data:`DEFAULT`, other policies with and without admission, and the bound, by name of costs."""

    sweeps: Mapping[str, Sweep]

    def claims(self) -> list[Claim]:
        return [self._never_behind(), self._ahead(), self._mean(), self._latest(), self._gap()]

    def _points(self) -> Iterable[tuple[str, Sweep, Point]]:
        return [(name, sweep, point) for name, sweep in self.sweeps.items() for point in sweep.points]

    def _lead(self, sweep: Sweep, point: Point) -> tuple[float, str]:
        """Over the best other policy, and which that is."""
        others = _others(sweep)
        best = max(others, key=lambda name: sweep.mean(point, name, "slo_attainment"))
        return sweep.difference(point, DEFAULT, best, "slo_attainment").mean, best

    def _never_behind(self) -> Claim:
        leads = {
            f"{name} {point}, {best}": lead
            for name, sweep, point in self._points()
            for lead, best in [self._lead(sweep, point)]
        }
        behind = {what: lead for what, lead in leads.items() if lead < -MAX_LOSS}
        return Claim(
            "attainment at least the best of all other policies, with and without admission, chosen for each "
            "setting, minus 0.5 points",
            "every setting",
            _count(leads, behind, lambda lead: f"{100 * lead:+.1f}"),
            Verdict.FAILS if behind else Verdict.HOLDS,
        )

    def _ahead(self) -> Claim:
        chosen = [(s, p) for _, s, p in self._points() if p.load is not None and p.load >= OVERLOAD]
        leads = [self._lead(sweep, point) for sweep, point in chosen]
        possible = [
            sweep.difference(point, BOUND, best, "slo_attainment").mean
            for (sweep, point), (_, best) in zip(chosen, leads, strict=True)
        ]
        lead, most = statistics.fmean([lead for lead, _ in leads]), statistics.fmean(possible)
        single = {
            name: statistics.fmean(
                [sweep.difference(point, DEFAULT, name, "slo_attainment").mean for sweep, point in chosen]
            )
            for name in _others(chosen[0][0])
        }
        nearest = min(single, key=lambda name: single[name])
        return Claim(
            "at least 10 points more than the best of all others, on average over loads of 0.9 and more",
            "loads from 0.9",
            f"{100 * lead:+.1f} over the best chosen for each setting, where the bound is {100 * most:+.1f}; "
            f"{100 * single[nearest]:+.1f} over {nearest}, the best single policy",
            Verdict.HOLDS if lead >= LEAD else Verdict.FAILS,
            "the bound leaves less than that" if most < LEAD else "",
        )

    def _mean(self) -> Claim:
        ratios = {}
        for name, sweep, point in self._points():
            means_s = {policy: sweep.mean(point, policy, "mean_latency_s") for policy in (DEFAULT, *FAST)}
            best = min(FAST, key=means_s.__getitem__)
            ratios[f"{name} {point}, {best}"] = means_s[DEFAULT] / means_s[best]
        slower = {what: ratio for what, ratio in ratios.items() if ratio > MAX_MEAN}
        return Claim(
            "mean latency at most 1.05 times the best of edf, srtf and tetriserve, chosen for each setting",
            "95 % of settings",
            f"{statistics.geometric_mean(ratios.values()):.2f} times on average; "
            + _count(ratios, slower, "{:.2f}".format),
            Verdict.FAILS if len(slower) > MAX_SLOWER * len(ratios) else Verdict.HOLDS,
        )

    def _latest(self) -> Claim:
        ratios = {
            f"{name} {point}": sweep.mean(point, DEFAULT, "p99_latency_s")
            / sweep.mean(point, "fcfs", "p99_latency_s")
            for name, sweep, point in self._points()
            if point.load is not None and point.load <= OVERLOAD
        }
        if not ratios:
            return Claim("99th percentile", "loads up to 0.9", "no such setting", Verdict.NOT_JUDGED)
        later = {what: ratio for what, ratio in ratios.items() if ratio > MAX_LATEST}
        return Claim(
            "99th percentile of the latency at most 1.25 times that of fcfs",
            "loads up to 0.9",
            f"{statistics.geometric_mean(ratios.values()):.2f} times on average; "
            + _count(ratios, later, "{:.2f}".format),
            Verdict.FAILS if later else Verdict.HOLDS,
            "the price of the deadlines met and of the lower mean; the argument `patience` sets it",
        )

    def _gap(self) -> Claim:
        gaps = {
            name: [sweep.difference(point, BOUND, DEFAULT, "slo_attainment").mean for point in sweep.points]
            for name, sweep in self.sweeps.items()
        }
        usual = [gap for name, of_sweep in gaps.items() if name not in MAX_GAP_OF for gap in of_sweep]
        holds = not usual or statistics.fmean(usual) <= MAX_GAP
        for name, most in MAX_GAP_OF.items():
            holds = holds and (not gaps.get(name) or statistics.fmean(gaps[name]) <= most)
        each = ", ".join(f"{name} {100 * statistics.fmean(of_sweep):.1f}" for name, of_sweep in gaps.items())
        return Claim(
            "at most 3 points below the upper bound on average, with flux at most 8",
            "every setting",
            f"{100 * statistics.fmean(usual):.1f} points without flux ({each})" if usual else f"{each} points",
            Verdict.HOLDS if holds else Verdict.FAILS,
        )


def _others(sweep: Sweep) -> list[str]:
    return [name for name in sweep.policies if name.removesuffix(ADMISSION) not in (DEFAULT, *SIDES)]


def _count(values: Mapping[str, float], exceptions: Mapping[str, float], form: Callable[[float], str]) -> str:
    text = f"in {len(values) - len(exceptions)} of {len(values)} settings"
    if exceptions:
        worst = sorted(exceptions, key=lambda what: abs(exceptions[what] - 1), reverse=True)[:NAMED]
        text += "; worst elsewhere: " + "; ".join(f"{what}: {form(exceptions[what])}" for what in worst)
    return text
