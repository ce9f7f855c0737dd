"""Published statements against what was measured here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gfdit.sim.estimates import Estimate
from gfdit.sim.sweep import Point, Sweep

ATTAINMENT = "slo_attainment_grace"


@dataclass(frozen=True, slots=True)
class Claim:
    """``holds`` None: it cannot be judged from a simulation. ``why`` explains a claim that does not hold."""

    statement: str
    source: str
    measured: str
    holds: bool | None
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
    found = [
        Rival(point, other, sweep.difference(point, other, policy, metric)) for point in points for other in others
    ]
    return [rival for rival in found if rival.lead.mean > 0]


def count_led(num_points: int, rivals: Sequence[Rival]) -> str:
    """In how many points nobody is ahead, and who is in the others."""
    behind = {rival.point for rival in rivals}
    text = f"nobody ahead in {num_points - len(behind)} of {num_points} points"
    if rivals:
        text += "; ahead: " + "; ".join(
            f"{rival.policy} at {rival.point} by {percent(rival.lead)} points" for rival in rivals
        )
    return text


def percent(value: Estimate) -> str:
    interval = "" if value.ci95 is None else f" ± {100 * value.ci95:.1f}"
    return f"{100 * value.mean:.1f}{interval}"


def claims_table(claims: Sequence[Claim]) -> list[str]:
    verdicts = {True: "**holds**", False: "**does not hold**", None: "not judged here"}
    lines = ["| published | where | measured here | verdict |", "|---|---|---|---|"]
    for claim in claims:
        verdict = verdicts[claim.holds] + (f": {claim.why}" if claim.why else "")
        lines.append(f"| {claim.statement} | {claim.source} | {claim.measured} | {verdict} |")
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
            cells = [_cell(sweep.estimate(point, policy, metric), scale) for point in points]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _cell(value: Estimate | None, scale: float) -> str:
    if value is None:
        return "-"
    interval = "" if value.ci95 is None else f" ± {scale * value.ci95:.1f}"
    return f"{scale * value.mean:.1f}{interval}"
