"""The cost tables in the package are what their figures say, and are what the generator writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfdit.core import ParallelSpec, Request, Shape, TaskKind
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.sim.costs import flux_costs
from gfdit.sim.costs.cost_tables import FOLDER, load_cost_table, shipped_tables
from gfdit.sim.costs.measured_costs import QWEN
from gfdit.sim.costs.published_costs import QWEN_STEP_MS, TABLES, write_all
from gfdit.sim.graphs import GraphBuilder


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
    assert set(shipped_tables()) == {name for name, _ in TABLES}


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
    with pytest.raises(
        ValueError,
        match=r"costs\.json does not exist.*flux-h100, flux-h100-compiled, .*, wan2\.2-synthetic",
    ):
        load_cost_table("costs.json")


# FLUX: derived, so what is tested is that it says what the paper says of its times.


FLUX = load_cost_table("flux-h100")
SIDES = (256, 512, 1024, 2048)
DEADLINES_S = (1.5, 2.0, 3.0, 5.0)


def step_s(side: int, sp: int, batch: int = 1) -> float:
    (found,) = (
        entry.seconds
        for entry in FLUX.entries
        if (entry.task, entry.height, entry.sp, entry.batch) == (TaskKind.DENOISE, side, sp, batch)
    )
    return found


def test_the_narrowest_degrees_that_keep_the_deadlines_are_the_published_ones() -> None:
    cost = TableCostModel(FLUX)
    for side, deadline_s, degree in zip(SIDES, DEADLINES_S, (1, 1, 2, 8), strict=True):
        request = Request("r", "flux.1-dev", Shape(side, side), 20, 0.0)
        graph = GraphBuilder(cost, 8).build(request)
        in_time = []
        for sp in (1, 2, 4, 8):
            others_s = GraphBuilder(cost, 8).service_s(request) - 20 * step_s(side, 1)
            if others_s + 20 * step_s(side, sp) <= deadline_s:
                in_time.append(sp)
        assert in_time[0] == degree and len(graph.tasks) == 23


def test_the_largest_image_takes_up_to_a_minute_on_one_rank() -> None:
    assert 55 < 50 * step_s(2048, 1) <= 61


def test_large_images_scale_and_small_ones_do_not() -> None:
    efficiency = [step_s(side, 1) / (8 * step_s(side, 8)) for side in SIDES]
    assert efficiency == sorted(efficiency) and efficiency[0] < 0.2 and efficiency[-1] > 0.8


def test_communication_exceeds_30_percent_of_a_step_of_small_images() -> None:
    for side in (256, 512):
        compute_s = flux_costs.FIXED_S + 4 * flux_costs.TFLOP_PER_IMAGE[side] / 50 / flux_costs.TFLOP_PER_S / 8
        assert 1 - compute_s / step_s(side, 8, batch=4) > 0.3


def test_small_images_gain_from_batches() -> None:
    assert {entry.height for entry in FLUX.entries if entry.batch > 1} == {256, 512}
    for side in (256, 512):
        for sp in (1, 2, 4, 8):
            times_s = [step_s(side, sp, batch) / batch for batch in (1, 2, 4)]
            assert times_s == sorted(times_s, reverse=True)
    assert 4 * step_s(256, 8) / step_s(256, 8, batch=4) > 2  # as much work in less than half the time


def test_what_handing_latents_over_takes_is_nothing_beside_a_step() -> None:
    cost = TableCostModel(FLUX)
    for side in SIDES:
        copy_s = cost.copy_s("flux.1-dev", Shape(side, side), False, "latents", 1)
        assert copy_s < 0.004 * step_s(side, 1)  # published: 0.0005, of transfers that run beside the steps


# Artifacts


@pytest.mark.parametrize(
    ("name", "shape", "latents"),
    [
        ("flux-h100", Shape(1024, 1024), 4096 * 64 * 2),
        ("qwen-image-h20", Shape(1024, 1024), 4096 * 64 * 2),
        ("wan2.2-synthetic", Shape(480, 832, 81), 21 * 30 * 52 * 48 * 2),
    ],
)
def test_artifact_sizes(name: str, shape: Shape, latents: int) -> None:
    table = load_cost_table(name)
    sizes = {size.artifact: size.num_bytes for size in table.artifacts if size.shape == shape}
    assert sizes.keys() == {"conditioning", "latents"} and sizes["latents"] == latents
    assert {size.shape for size in table.artifacts} == {entry.shape for entry in table.entries}
    assert "derived" in table.source


# Measured elsewhere, of whole generations: the tables give them back, and what was derived is as they are


@pytest.mark.parametrize(
    ("name", "shape", "num_steps", "cfg", "whole_s"),
    [
        ("flux-h100-eager", Shape(1024, 1024), 28, False, {1: 6.71, 2: 4.38, 4: 4.24}),
        ("flux-h100-compiled", Shape(1024, 1024), 28, False, {1: 4.30, 2: 2.68, 4: 1.63}),
        ("qwen-image-h800", Shape(2048, 2048), 50, False, {1: 112.5, 2: 65.2, 4: 39.6, 8: 30.8}),
        ("hunyuanvideo-h100", Shape(720, 1280, 129), 50, False, {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58}),
    ],
)
def test_a_whole_generation_takes_what_was_measured(
    name: str, shape: Shape, num_steps: int, cfg: bool, whole_s: dict[int, float]
) -> None:
    table = load_cost_table(name)
    others_s = sum(seconds(table, kind, shape) for kind in (TaskKind.ENCODE, TaskKind.PREPARE, TaskKind.DECODE))
    for sp, expected_s in whole_s.items():
        assert others_s + num_steps * seconds(table, TaskKind.DENOISE, shape, sp) == pytest.approx(
            expected_s, rel=1e-5
        )


def test_wan_on_up_to_72_ranks() -> None:
    table = load_cost_table("wan2.2-gb200")
    steps_s = {
        entry.parallel.size: 40 * entry.seconds
        for entry in table.entries
        if (entry.task, entry.shape) == (TaskKind.DENOISE, Shape(720, 1280, 80))
    }
    assert steps_s == pytest.approx(
        {1: 348.4, 2: 174.0, 4: 95.89, 8: 48.06, 16: 25.6, 24: 18.46, 32: 14.12, 64: 8.48, 72: 7.04}, rel=1e-5
    )
    assert seconds(table, TaskKind.DECODE, Shape(720, 1280, 80), 8) == 0.83


def test_operations_explain_what_was_measured_at_several_sizes() -> None:
    sides = (512, 1024, 1536)
    rates = [QWEN.operations(Shape(side, side)) / QWEN_STEP_MS[side][0] for side in sides]
    assert max(rates) < 1.05 * min(rates)


@pytest.mark.parametrize("name", ["flux-h100-eager", "flux-h100-compiled", "qwen-image-h800", "hunyuanvideo-h100"])
def test_smaller_shapes_take_less_and_gain_less_from_ranks(name: str) -> None:
    table = load_cost_table(name)
    shapes = sorted({entry.shape for entry in table.entries}, key=lambda shape: shape.num_tokens)
    for sp in (1, 2, 4, 8):
        times_s = [seconds(table, TaskKind.DENOISE, shape, sp) for shape in shapes]
        assert times_s == sorted(times_s)
    gains = [seconds(table, TaskKind.DENOISE, s) / seconds(table, TaskKind.DENOISE, s, 8) for s in shapes]
    assert gains == sorted(gains)


@pytest.mark.parametrize("name", shipped_tables())
def test_every_table_says_what_its_ranks_exchange(name: str) -> None:
    table = load_cost_table(name)
    assert {exchanges.model for exchanges in table.exchanges} == {entry.model for entry in table.entries}
