"""The cost tables in the package are what their figures say, and are what the generator writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfdit.core import ParallelSpec, Shape, TaskKind
from gfdit.core.cost_file import CostTable
from gfdit.sim.cost_tables import FOLDER, load_cost_table, shipped_tables
from gfdit.sim.published_costs import write_all


def seconds(table: CostTable, kind: TaskKind, shape: Shape, sp: int = 1) -> float:
    (found,) = (
        entry.seconds
        for entry in table.entries
        if (entry.task, entry.shape, entry.parallel) == (kind, shape, ParallelSpec(sp))
    )
    return found


def test_the_generator_writes_the_files_that_are_there(tmp_path: Path) -> None:
    write_all(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    assert shipped_tables() == ("qwen-image-h20", "wan2.2-synthetic")


def test_qwen_image_figures() -> None:
    table = load_cost_table("qwen-image-h20")
    assert "H20" in table.hardware and "GF-DiT" in table.source
    square = Shape(1024, 1024)
    assert [seconds(table, TaskKind.DENOISE, square, sp) for sp in (1, 2, 4)] == [0.605, 0.350, 0.207]
    assert seconds(table, TaskKind.DENOISE, Shape(512, 512), 4) == 0.172
    assert seconds(table, TaskKind.ENCODE, square) == 0.055
    assert seconds(table, TaskKind.DECODE, square) == pytest.approx(0.1005 + 9e-11 * 1024 * 1024)
    assert {entry.cfg for entry in table.entries} == {False} and table.migration_latency_s == 0.003


def test_wan_figures() -> None:
    table = load_cost_table("wan2.2-synthetic")
    tokens = {Shape(480, 832, 49): 5070, Shape(480, 832, 81): 8190, Shape(720, 1280, 81): 18480}
    assert {entry.shape for entry in table.entries} == tokens.keys()
    for shape, count in tokens.items():
        for sp, speedup in ((1, 1.0), (2, 1.82), (4, 3.33), (8, 5.88)):
            expected_s = (0.1323 * count / speedup + 20 * (sp - 1)) / 1000
            assert seconds(table, TaskKind.DENOISE, shape, sp) == pytest.approx(expected_s, abs=1e-6)
    assert {entry.cfg for entry in table.entries} == {True}


def test_a_table_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"costs\.json does not exist.*qwen-image-h20, wan2\.2-synthetic"):
        load_cost_table("costs.json")
