"""Published statements against what was measured here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gfdit.sim.estimates import Estimate
from gfdit.sim.sweep import Point, Sweep

ATTAINMENT = "slo_attainment_grace"
CLEARLY = (
    "A policy is clearly ahead (!) if the 95 % interval of its lead, taken seed by seed on the same traces, "
    "is above zero. A claim that a policy is best does not hold if another one is clearly ahead in any "
    "setting."
)


class Verdict(StrEnum):
    HOLDS = "**holds**"
    WITHIN_NOISE = "**not contradicted**: not in every mean, but seeds alone may explain the exceptions"
    FAILS = "**does not hold**"
    NOT_JUDGED = "not judged here"


@dataclass(frozen=True, slots=True)
class Claim:
    """``why`` explains a claim that does not hold; it is left out if the numbers have it otherwise."""

    statement: str
    source: str
    measured: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rival:
    """A policy that is ahead of another one at a point, by ``lead`` on the same traces."""

    point: Point
    policy: str
    lead: Estimate

    @property
    def is_clear(self) -> bool:
        """Whether seeds alone do not explain it: the confidence interval of the lead is above zero."""
        return self.lead.ci95 is not None and self.lead.low > 0


def rivals_of(
    sweep: Sweep, policy: str, others: Iterable[str], points: Iterable[Point], metric: str = ATTAINMENT
) -> list[Rival]:
    """Whoever has a higher mean of ``metric`` than ``policy`` at one of ``points``."""
    found = [lead_of(sweep, point, other, policy, metric) for point in points for other in others]
    return [rival for rival in found if rival.lead.mean > 0]


def lead_of(
    sweep: Sweep, point: Point, policy: str, other: str, metric: str = ATTAINMENT, *, more_is_better: bool = True
) -> Rival:
    """By how much ``policy`` is better than ``other``, as a positive number."""
    pair = (policy, other) if more_is_better else (other, policy)
    return Rival(point, policy, sweep.difference(point, *pair, metric))


def verdict_of(rivals: Sequence[Rival]) -> Verdict:
    """Of the claim that nobody is ahead."""
    if any(rival.is_clear for rival in rivals):
        return Verdict.FAILS
    return Verdict.WITHIN_NOISE if rivals else Verdict.HOLDS


def count_led(num_points: int, rivals: Sequence[Rival], unit: str = "points") -> str:
    """In how many points nobody is ahead, and who is in the others; what is clear is marked."""
    behind = {rival.point for rival in rivals}
    text = f"nobody ahead in {num_points - len(behind)} of {num_points} settings"
    if rivals:
        named = [f"{rival.policy} at {rival.point} by {_amount(rival, unit)}" for rival in rivals]
        text += f"; ahead (clearly: !): {'; '.join(named)}"
    return text


def _amount(rival: Rival, unit: str) -> str:
    lead = percent(rival.lead) if unit == "points" else f"{rival.lead.mean:.2g} ± {rival.lead.ci95 or 0:.1g}"
    return f"{lead} {unit}{' !' if rival.is_clear else ''}"


def percent(value: Estimate) -> str:
    return value.shown(100)


def claims_table(claims: Sequence[Claim], title: str = "published") -> list[str]:
    lines = [f"| {title} | where | measured here | verdict |", "|---|---|---|---|"]
    for claim in claims:
        why = f": {claim.why}" if claim.why and claim.verdict is Verdict.FAILS else ""
        lines.append(f"| {claim.statement} | {claim.source} | {claim.measured} | {claim.verdict}{why} |")
    return lines


def attainment_table(sweep: Sweep, metric: str = ATTAINMENT, scale: float = 100.0) -> list[str]:
    """A block for what points have in common, a row per policy: mean and interval over seeds."""
    lines: list[str] = []
    for common, points in sweep.groups().items():
        values = [getattr(point, sweep.axis) for point in points]
        heads = [f"{value:g}" for value in values]
        lines += [f"| {common}: {sweep.axis.replace('_', ' ')} | {' | '.join(heads)} |"]
        lines += ["|---" * (len(points) + 1) + "|"]
        for policy in sweep.policies:
            found = [sweep.estimate(point, policy, metric) for point in points]
            if not any(found):
                continue  # the bound has no latencies
            cells = ["-" if value is None else value.shown(scale) for value in found]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        lines.append("")
    return lines
