"""Pictures of comparisons say what the numbers say, at least in places and colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from gfdit.sim.compare import Job, PolicyChoice, simulate_spans
from gfdit.sim.plots import plot_attainment, plot_latencies, plot_runs, plot_trade_off
from gfdit.sim.simulator import SimulationOptions
from gfdit.sim.sweep import BOUND, Cell, Point, Sweep
from tests.sim.tables import line, table

FIRST, SECOND = (0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def rows_of(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Rows with that colour above the legend, which is the lowest eighth."""
    rows = np.nonzero((picture == colour).all(axis=2).any(axis=1))[0]
    return rows[rows < picture.shape[0] * 7 / 8]


def made_up(attainment: dict[str, float], *, loads: tuple[float, ...] = (0.5, 1.0)) -> Sweep:
    return Sweep(
        tuple(
            Cell(Point("short", load), seed, policy, {"slo_attainment_grace": value, "latencies_s": [1.0, 2.0]})
            for load in loads
            for seed in (0, 1)
            for policy, value in attainment.items()
        )
    )


def test_a_trade_off_is_a_curve_per_title(tmp_path: Path) -> None:
    curves = {"low": [(1.0, 10.0, "a"), (2.0, 20.0, "b")], "high": [(1.0, 80.0, "a"), (2.0, 90.0, "b")]}
    plot_trade_off(curves, tmp_path / "t.png", x_label="x", y_label="y")
    picture = pixels(tmp_path / "t.png")
    assert rows_of(picture, SECOND).max() < rows_of(picture, FIRST).min()


def test_more_deadlines_met_is_higher(tmp_path: Path) -> None:
    plot_attainment(made_up({"low": 0.2, "high": 0.8, BOUND: 0.9}), tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    assert rows_of(picture, SECOND).max() < rows_of(picture, FIRST).min()


def test_a_single_load_and_a_single_seed_are_a_picture(tmp_path: Path) -> None:
    sweep = made_up({"only": 0.5}, loads=(1.0,))
    plot_attainment(Sweep(sweep.cells[:1]), tmp_path / "a.png")
    assert len(rows_of(pixels(tmp_path / "a.png"), FIRST))


def test_shorter_latencies_are_further_left(tmp_path: Path) -> None:
    panels = {"p": {"fast": [1.0, 2.0, 3.0], "slow": [100.0, 200.0, 300.0], "none": []}}
    plot_latencies(panels, tmp_path / "l.png")
    picture = pixels(tmp_path / "l.png")
    above_legend = picture[: picture.shape[0] * 7 // 8]
    columns = [np.nonzero((above_legend == colour).all(axis=2).any(axis=0))[0] for colour in (FIRST, SECOND)]
    assert columns[0].max() < columns[1].min()


def test_requests_that_are_late_are_pale(tmp_path: Path) -> None:
    def area(deadline_s: float) -> int:
        trace = (line("a", deadline_s=deadline_s),)
        job = Job(PolicyChoice("fcfs"), trace, table(), SimulationOptions(2))
        outcome, spans = simulate_spans(job)
        plot_runs(trace, {"fcfs": outcome.result}, {"fcfs": spans}, tmp_path / "r.png", num_ranks=2)
        return int((pixels(tmp_path / "r.png") == FIRST).all(axis=2).sum())

    in_time, late = area(60.0), area(0.1)
    assert in_time > 20 * late > 0  # the legend keeps the colour
