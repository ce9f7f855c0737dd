"""What the reports have in common: how they run their sweeps and write their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks.policy_reports.claims import ADMISSION
from gfdit.sim.compare import PolicyChoice, in_processes, simulate_spans
from gfdit.sim.plots import plot_runs
from gfdit.sim.sweep import Grid, Point, Sweep, num_cases, run_sweep


@dataclass
class Report:
    """One Markdown file, its pictures and the means behind it, all under ``folder``."""

    name: str
    title: str
    folder: Path
    source: dict[str, Any]
    num_seeds: int
    num_processes: int
    only: tuple[str, ...] = ()  # of the parts that can be run alone; all if empty
    first_seed: int = 0
    kept: Path | None = None  # where single simulations are kept
    points: tuple[str, ...] = ()  # such as ``short:0.9``, a workload and a load; all if empty
    lines: list[str] = field(default_factory=list)
    means: dict[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.first_seed, self.first_seed + self.num_seeds))

    def wants(self, part: str) -> bool:
        return not self.only or part in self.only

    def sweep(self, name: str, grid: Grid) -> Sweep:
        """Runs it and keeps its means. Raises ``ValueError`` if a policy made a mistake: no result then."""
        grids = [
            replace(grid, workloads=(workload,), loads=(load,))
            for workload in grid.workloads
            for load in grid.loads
            if not self.points or f"{workload}:{load}" in self.points
        ]
        with tqdm(total=sum(map(num_cases, grids)), desc=f"{self.name}: {name}", unit="run", disable=None) as bar:
            sweeps = [
                run_sweep(one, num_processes=self.num_processes, on_done=bar.update, kept=self.kept)
                for one in grids
            ]
        sweep = Sweep(tuple(cell for one in sweeps for cell in one.cells))
        if wrong := [cell for cell in sweep.cells if cell.complaint]:
            raise ValueError(f"{wrong[0].point}, seed {wrong[0].seed}: {wrong[0].policy}: {wrong[0].complaint}")
        self.means[name] = _rounded(sweep.as_json(cells=False)["points"])
        return sweep

    def admitted(self, name: str, grid: Grid, without: Sequence[str] = ()) -> Sweep:
        """``grid`` with policies behind ``--admission deadline``, as their names say; not those in ``without``."""
        able = [policy for policy in grid.policies if policy.label not in without]
        return self.sweep(f"{name}-admission", replace(grid, policies=with_admission(able), bound=False))

    def picture(self, name: str, caption: str) -> Path:
        """Where to write a picture that the text shows here."""
        path = self.folder / f"{self.name}_{name}.png"
        self.lines += [f"![{caption}]({path.name})", "", caption, ""]
        return path

    def lanes(self, name: str, caption: str, grid: Grid, point: Point) -> None:
        """A picture of what every policy ran where, in the trace of the first seed at ``point``."""
        jobs = [grid.job(point, grid.seeds[0], policy) for policy in grid.policies]
        runs = in_processes(simulate_spans, jobs, num_processes=self.num_processes)
        found = {job.policy.label: run for job, run in zip(jobs, runs, strict=True)}
        plot_runs(
            jobs[0].trace,
            {label: outcome.result for label, (outcome, _) in found.items()},
            {label: spans for label, (_, spans) in found.items()},
            self.picture(name, caption),
            num_ranks=grid.options.num_ranks,
        )

    def add(self, *lines: str) -> None:
        self.lines += lines

    def write(self) -> None:
        head = [
            f"# {self.title}",
            "",
            f"- {self.source['date']}, commit {self.source['commit']}, Python {self.source['python']}",
            f"- Command: `{self.source['command']}`; {self.num_seeds} seeds from {self.first_seed}, ± is a 95 % "
            "confidence interval",
            f"- Means of every point: [{self.name}.json]({self.name}.json)",
            "",
        ]
        text = "\n".join(head + self.lines).rstrip() + "\n"
        (self.folder / f"{self.name}.md").write_text(text, encoding="utf-8")
        data = {**self.source, "seeds": self.seeds, "sweeps": self.means}
        (self.folder / f"{self.name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


def with_admission(policies: Iterable[PolicyChoice]) -> tuple[PolicyChoice, ...]:
    return tuple(
        replace(policy, admission="deadline", name=f"{policy.label}{ADMISSION}")
        for policy in policies
        if policy.admission == "none"
    )


def _rounded(data: Any) -> Any:
    """Five decimals everywhere: more says nothing, and the file is kept in the repository."""
    if isinstance(data, float):
        return round(data, 5)
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list) else data
