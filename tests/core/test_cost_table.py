from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gfdit.core import (
    CostModel,
    ExecutionLayout,
    ParallelSpec,
    RequestView,
    Shape,
    TaskKind,
    TaskView,
    UnknownCostError,
    trajectory,
)
from gfdit.core.cost.calibrated import MAX_ANSWERS, CalibratedCostModel
from gfdit.core.cost.calibration import MAX_KEYS, WINDOW, Measured
from gfdit.core.cost.table import (
    ArtifactSize,
    CostEntry,
    CostKey,
    CostTable,
    MaskedSteps,
    NominalCostModel,
    TableCostModel,
)
from gfdit.core.tasks import artifact_kind

SP1, SP2, SP4 = ParallelSpec(1), ParallelSpec(2), ParallelSpec(4)
CANDIDATES = (SP4, SP1, SP2)
PUBLISHED_MS = {512: (155, 161, 172), 1024: (605, 350, 207), 1536: (1557, 880, 464)}


def entry(task: TaskKind, size: int, sp: int, seconds: float, **changes: Any) -> CostEntry:
    base = CostEntry("qwen", task, size, size, 1, False, sp, 1, 1, seconds)
    return replace(base, **changes)


def table() -> CostTable:
    denoise = [
        entry(TaskKind.DENOISE, size, sp, ms / 1000)
        for size, row in PUBLISHED_MS.items()
        for sp, ms in zip((1, 2, 4), row, strict=True)
    ]
    others = [entry(kind, 512, 1, 0.05) for kind in (TaskKind.ENCODE, TaskKind.PREPARE, TaskKind.DECODE)]
    batched = [entry(TaskKind.DENOISE, 512, 1, 0.2, batch=2)]
    return CostTable("H20", "published", 0.003, 1e9, (*denoise, *others, *batched))


def task(shape: Shape | int = 512, kind: TaskKind = TaskKind.DENOISE, **changes: Any) -> TaskView:
    shape = shape if isinstance(shape, Shape) else Shape(shape, shape)
    base = TaskView("r/x", "r", "qwen", kind, 0, shape, False, CANDIDATES, (("r/a", (0, 1)), ("r/b", (0,))))
    return structs.replace(base, **changes)


def request(**changes: Any) -> RequestView:
    left = {TaskKind.ENCODE: 0, TaskKind.PREPARE: 1, TaskKind.DENOISE: 10, TaskKind.DECODE: 1}
    base = RequestView(
        "r", "qwen", Shape(512, 512), False, 0, 10, 0.0, None, 0, "default", CANDIDATES, left, None, False
    )
    return structs.replace(base, **changes)


def on(spec: ParallelSpec, *ranks: int) -> ExecutionLayout:
    return ExecutionLayout(ranks or tuple(range(spec.size)), spec)


# The file


def test_a_table_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table().save(path)
    assert CostTable.load(path) == table()
    data = json.loads(path.read_text())
    assert data["version"] == 1 and data["migration"] == {"latency_s": 0.003, "bytes_per_s": 1e9}
    assert set(data["entries"][0]) == {
        *("model", "task", "height", "width", "num_frames", "cfg", "sp", "cfg_parallel", "batch", "seconds")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "field 'version' must be 1, got 2"),
        ({"hardware": None}, "field 'hardware' must be a non-empty string, got None"),
        ({"entries": []}, "field 'entries' must be a list with at least one entry"),
        ({"notes": "x"}, "field 'notes' is unknown, known: version, migration, hardware, source, entries"),
        ({"migration": {"latency_s": 0}}, "migration: field 'bytes_per_s' is missing"),
        (
            {"migration": {"latency_s": -1, "bytes_per_s": 1}},
            "migration: field 'latency_s' must be a non-negative number",
        ),
        ({"seconds": 0}, "entries[1]: field 'seconds' must be a positive number, got 0"),
        ({"seconds": float("nan")}, "entries[1]: field 'seconds' must be a positive number, got nan"),
        ({"seconds": True}, "entries[1]: field 'seconds' must be a positive number, got True"),
        ({"seconds": "1"}, "entries[1]: field 'seconds' must be a positive number, got '1'"),
        ({"sp": 0}, "entries[1]: field 'sp' must be an integer of at least 1, got 0"),
        ({"sp": 1.0}, "entries[1]: field 'sp' must be an integer of at least 1, got 1.0"),
        ({"cfg": 1}, "entries[1]: field 'cfg' must be true or false, got 1"),
        ({"cfg_parallel": 2}, "entries[1]: field 'cfg_parallel' is 2, but cfg is false"),
        (
            {"task": "denoising"},
            "entries[1]: field 'task' must be one of encode, prepare, control, denoise, decode, request, "
            "got 'denoising'",
        ),
        ({"second": 1}, "entries[1]: field 'second' is unknown"),
        ({"sp": 1}, "entries[1]: repeats entries[0]"),
    ],
)
def test_a_wrong_table_is_refused_with_file_entry_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "costs.json"
    table().save(path)
    data = json.loads(path.read_text())
    name = next(iter(change))
    (data if name in (*data, "notes") else data["entries"][1]).update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as caught:
        CostTable.load(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def sized_table() -> CostTable:
    sizes = (("latents", 512, 1000), ("latents", 1024, 4000), ("conditioning", 512, 5000))
    artifacts = tuple(
        ArtifactSize("qwen", kind, size, size, 1, False, num_bytes) for kind, size, num_bytes in sizes
    )
    return replace(table(), migration_bytes_per_s=1e6, artifacts=artifacts)


def test_artifact_sizes_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    sized_table().save(path)
    assert CostTable.load(path) == sized_table()
    assert json.loads(path.read_text())["artifacts"][0] == {
        **{"model": "qwen", "artifact": "latents", "height": 512, "width": 512, "num_frames": 1, "cfg": False},
        "bytes": 1000,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": 0}, "artifacts[1]: field 'bytes' must be an integer of at least 1, got 0"),
        ({"artifact": ""}, "artifacts[1]: field 'artifact' must be a non-empty string"),
        ({"num_bytes": 5}, "artifacts[1]: field 'num_bytes' is unknown"),
        ({"height": 512, "width": 512}, "artifacts[1]: repeats artifacts[0]"),
    ],
)
def test_a_wrong_artifact_size_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "costs.json"
    sized_table().save(path)
    data = json.loads(path.read_text())
    data["artifacts"][1].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as caught:
        CostTable.load(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text, message in [("{", "not JSON: "), ("[]", "must be an object, got []")]:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"costs\.json") as caught:
            CostTable.load(path)
        assert message in str(caught.value)
    with pytest.raises(OSError):
        CostTable.load(tmp_path / "absent.json")


# The model over a table


def test_published_shapes_are_looked_up() -> None:
    model: CostModel = TableCostModel(table())
    for size, row in PUBLISHED_MS.items():
        for spec, ms in zip((SP1, SP2, SP4), row, strict=True):
            assert model.task_s(task(size), on(spec)) == ms / 1000
    assert model.task_s(task(512), on(SP1), batch=2) == 0.2


def test_a_batch_beyond_its_largest_shape_has_no_time() -> None:
    model = TableCostModel(table())
    assert model.task_s(task(256), on(SP1), batch=2) < 0.2
    for _ in range(2):
        with pytest.raises(UnknownCostError, match=r"at sp1 batch 2, .* of smaller shapes only"):
            model.task_s(task(1024), on(SP1), batch=2)
    assert model.task_s(task(512), on(SP1), batch=2) == 0.2


def test_other_shapes_are_interpolated_in_tokens() -> None:
    model = TableCostModel(table())
    between = Shape(1024, 640)  # 2560 tokens, half way from 1024 to 4096
    assert model.task_s(task(between), on(SP1)) == pytest.approx((0.155 + 0.605) / 2)
    # Beyond the largest the last segment goes on; 18432 tokens are twice 9216.
    slope = (1.557 - 0.605) / (9216 - 4096)
    assert model.task_s(task(Shape(1536, 3072)), on(SP1)) == pytest.approx(1.557 + slope * 9216)
    # Below the smallest too, where a fixed part remains.
    assert model.task_s(task(256), on(SP4)) == pytest.approx(0.172 - (0.207 - 0.172) * 768 / 3072)
    # One point alone scales with tokens.
    assert model.task_s(task(1024, TaskKind.DECODE), on(SP1)) == pytest.approx(0.2)


@given(height=st.integers(16, 8192), width=st.integers(16, 8192), spec=st.sampled_from([SP1, SP2, SP4]))
def test_an_interpolated_cost_is_positive_and_never_falls_with_size(
    height: int, width: int, spec: ParallelSpec
) -> None:
    model = TableCostModel(table())
    small, large = Shape(height, width), Shape(height, 2 * width)
    assert 0 < model.task_s(task(small), on(spec)) <= model.task_s(task(large), on(spec))


def test_a_falling_curve_stays_positive() -> None:
    entries = tuple(entry(TaskKind.DENOISE, size, 1, seconds) for size, seconds in [(512, 0.3), (1024, 0.1)])
    model = TableCostModel(replace(table(), entries=entries))
    assert model.task_s(task(4096), on(SP1)) == 0.1
    steep = tuple(entry(TaskKind.DENOISE, size, 1, seconds) for size, seconds in [(512, 0.001), (1024, 1.0)])
    model = TableCostModel(replace(table(), entries=steep))
    assert model.task_s(task(256), on(SP1)) == pytest.approx(0.00025)


@pytest.mark.parametrize(
    ("view", "spec", "message"),
    [
        (task(model="flux"), SP1, "no cost for model 'flux', known: qwen"),
        (
            task(cfg=True),
            SP1,
            "no cost for denoise of model 'qwen' at sp1 with cfg, known: sp1, sp2, sp4, sp1 batch 2",
        ),
        (task(), ParallelSpec(8), "at sp8, known: sp1, sp2, sp4, sp1 batch 2"),
        (task(kind=TaskKind.ENCODE), SP2, "no cost for encode of model 'qwen' at sp2, known: sp1"),
    ],
)
def test_what_is_missing_is_an_error_that_names_the_known(
    view: TaskView, spec: ParallelSpec, message: str
) -> None:
    with pytest.raises(UnknownCostError) as caught:
        TableCostModel(table()).task_s(view, on(spec))
    assert message in str(caught.value)
    assert caught.value.request_id == "r"


def test_a_missing_task_kind_is_an_error_for_the_whole_request() -> None:
    only = tuple(e for e in table().entries if e.task is TaskKind.DENOISE)
    model = TableCostModel(replace(table(), entries=only))
    with pytest.raises(UnknownCostError, match="no cost for task prepare of model 'qwen', known: denoise"):
        model.remaining_s(request(), on(SP1))


def test_remaining_time_counts_every_unfinished_task() -> None:
    model = TableCostModel(table())
    assert model.remaining_s(request(), on(SP1)) == pytest.approx(0.05 + 10 * 0.155 + 0.05)
    assert model.remaining_s(request(), on(SP2)) == pytest.approx(0.05 + 10 * 0.161 + 0.05)
    # A specification the request cannot take: the widest that is not wider.
    assert model.remaining_s(request(candidates=(SP1, SP2)), on(SP4)) == pytest.approx(0.05 + 10 * 0.161 + 0.05)


def test_candidates_are_those_with_a_cost_narrowest_first() -> None:
    model = TableCostModel(table())
    assert model.candidates(task(candidates=(ParallelSpec(8), SP4, SP1))) == (SP1, SP4)
    with pytest.raises(UnknownCostError, match="known: sp1, sp2, sp4"):
        model.candidates(task(candidates=(ParallelSpec(8),)))


def test_a_time_for_batches_alone_makes_no_candidate() -> None:
    only = (entry(TaskKind.DENOISE, 512, 1, 0.155), entry(TaskKind.DENOISE, 512, 2, 0.2, batch=2))
    model = TableCostModel(replace(table(), entries=only))
    assert model.candidates(task()) == (SP1,)
    assert model.task_s(task(), on(SP2), batch=2) == 0.2
    with pytest.raises(UnknownCostError, match="at sp2, known: sp1, sp2 batch 2"):
        model.task_s(task(), on(SP2))
    with pytest.raises(UnknownCostError, match="at sp1 batch 2, known: sp1, sp2 batch 2"):
        model.task_s(task(), on(SP1), batch=2)


def test_without_sizes_migration_costs_its_latency_if_anything_moves() -> None:
    model = TableCostModel(table())
    assert model.migration_s(task(), on(SP1, 0)) == 0.0
    assert model.migration_s(task(), on(SP2, 1, 0)) == 0.003  # rank 1 lacks r/b


def test_migration_costs_latency_and_bytes_of_what_moves() -> None:
    model = TableCostModel(sized_table())
    held = (("r/conditioning", (0, 1)), ("r/latents/3", (0,)))
    assert model.migration_s(task(artifacts=held), on(SP1, 0)) == 0.0
    assert model.migration_s(task(artifacts=held), on(SP2, 0, 1)) == pytest.approx(0.003 + 0.001)
    # Ranks 2 and 3 lack both, rank 1 the latents: two copies of one, three of the other.
    expected_s = 0.003 + 2 * 0.005 + 0.003 + 3 * 0.001
    assert model.migration_s(task(artifacts=held), on(SP4, 0, 1, 2, 3)) == pytest.approx(expected_s)
    # Sizes between and beyond the known ones; a single known size grows with the tokens.
    between = task(Shape(1024, 640), artifacts=held)  # half way from 1024 to 4096 tokens
    assert model.migration_s(between, on(SP2, 0, 1)) == pytest.approx(0.003 + 0.0025)
    large = task(1024, artifacts=(("r/conditioning", (0,)),))
    assert model.migration_s(large, on(SP2, 0, 1)) == pytest.approx(0.003 + 0.020)
    # What has no size: another model, another kind.
    assert model.migration_s(task(model="flux", artifacts=held), on(SP2, 0, 1)) == 0.003
    assert model.migration_s(task(artifacts=(("r/mask", (0,)),)), on(SP2, 0, 1)) == 0.003


@pytest.mark.parametrize("request_id", ["r", "team/r", "latents/1"])
def test_kinds_of_artifacts(request_id: str) -> None:
    (encode, *_, decode) = trajectory(request_id, 2, (SP1,)).tasks
    kinds = [artifact_kind(request_id, name) for name in (*encode.outputs, *decode.inputs)]
    assert kinds == ["conditioning", "conditioning", "latents"]


# Calibration


def test_a_table_may_say_what_masks_leave_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    known = replace(table(), masked_steps=(MaskedSteps("qwen", 0.2, 0.99),))
    known.save(path)
    assert CostTable.load(path) == known
    masked = task(Shape(512, 512, computed_percent=50))
    assert TableCostModel(known).task_s(masked, on(SP1)) == pytest.approx(0.155 * 0.6)
    data = json.loads(path.read_text())
    for change, message in (({"unmasked_share": 1.5}, "must be at most 1"), ({"r": 1}, "field 'r' is unknown")):
        wrong = [data["masked_steps"][0] | change]
        path.write_text(json.dumps({**data, "masked_steps": wrong}))
        with pytest.raises(ValueError, match=re.escape("masked_steps[0]: ") + ".*" + message):
            CostTable.load(path)


def test_measurements_correct_their_own_key_and_outliers_do_not_matter() -> None:
    model = TableCostModel(table())
    before = model.task_s(task(512), on(SP1))
    for seconds in (9.0, 0.31, 0.31):  # warm-up first
        assert model.task_s(task(512), on(SP1)) == before
        model.observe(task(512), on(SP1), seconds)
    for seconds in (0.31, 50.0, 0.31, 0.0, float("nan")):
        model.observe(task(512), on(SP1), seconds)
    assert model.task_s(task(512), on(SP1)) == pytest.approx(0.31)
    assert model.task_s(task(512), on(SP2)) == 0.161
    measured = model.measured[CostKey("qwen", TaskKind.DENOISE, Shape(512, 512), False, SP1, 1)]
    assert measured.count == 6
    assert measured.ratio == pytest.approx(2.0)
    assert measured.spread == 0.0


def test_several_outputs_are_a_size_of_their_own() -> None:
    """Ten images take longer than one of the same size, and what they take says nothing of one."""
    model = TableCostModel(table())
    one, four = task(Shape(512, 512)), task(Shape(512, 512, num_outputs=4))
    before_s = model.task_s(one, on(SP1))
    assert model.task_s(four, on(SP1)) == pytest.approx(0.605), "as of one image with as many tokens"
    for _ in range(3):
        model.observe(four, on(SP1), 0.9)
    assert model.task_s(four, on(SP1)) == pytest.approx(0.9)
    assert model.task_s(one, on(SP1)) == before_s


def test_a_masked_step_costs_by_the_tokens_it_computes() -> None:
    """What such steps take is learned of them alone, and other tasks of an edit cost as of any request."""
    model = TableCostModel(table())
    whole, masked = Shape(512, 512), Shape(512, 512, computed_percent=20)
    assert model.task_s(task(masked), on(SP1)) == pytest.approx(0.155 * (0.05 + 0.95 * 0.2))
    for kind in (TaskKind.ENCODE, TaskKind.DECODE):
        assert model.task_s(task(masked, kind), on(SP1)) == model.task_s(task(whole, kind), on(SP1))
    for _ in range(WINDOW):
        model.observe(task(masked), on(SP1), 0.05)
        model.observe(task(masked, TaskKind.DECODE), on(SP1), 0.07)
    assert model.task_s(task(masked), on(SP1)) == pytest.approx(0.05)
    assert model.task_s(task(whole), on(SP1)) == 0.155
    assert model.task_s(task(whole, TaskKind.DECODE), on(SP1)) == pytest.approx(0.07)


@settings(max_examples=30)
@given(
    good=st.lists(st.floats(0.9, 1.1), min_size=WINDOW // 2 + 1, max_size=WINDOW // 2 + 1),
    outliers=st.lists(st.floats(1e-6, 1e6), max_size=WINDOW // 2),
    data=st.data(),
)
def test_a_minority_of_outliers_leaves_estimate_and_spread_among_the_others(
    good: list[float], outliers: list[float], data: st.DataObject
) -> None:
    model = TableCostModel(table())
    for ratio in data.draw(st.permutations([*good, *outliers])):
        model.observe(task(512), on(SP1), 0.155 * ratio)
    (measured,) = model.measured.values()
    assert min(good) - 1e-9 <= measured.ratio <= max(good) + 1e-9
    assert model.task_s(task(512), on(SP1)) == pytest.approx(0.155 * measured.ratio)
    assert measured.count == len(good) + len(outliers)
    assert measured.spread <= (max(good) - min(good)) / measured.ratio + 1e-9


def test_a_majority_of_outliers_is_no_minority() -> None:
    """The bound of the test before is sharp."""
    model = TableCostModel(table())
    for ratio in [1.0] * (WINDOW // 2) + [9.0] * (WINDOW // 2 + 1):
        model.observe(task(512), on(SP1), 0.155 * ratio)
    assert model.task_s(task(512), on(SP1)) == pytest.approx(9 * 0.155)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_the_ratio_is_the_lower_median_of_the_last_measurements(ratios: list[float]) -> None:
    measured = Measured()
    for count, ratio in enumerate(ratios, start=1):
        measured.add(ratio)
        recent = sorted(ratios[max(0, count - WINDOW) : count])
        assert measured.ratio == statistics.median_low(recent) and measured.count == count


def test_spread_is_relative_to_the_ratio() -> None:
    model = TableCostModel(table())
    for seconds in (0.9, 1.0, 1.1, 0.9, 1.1):
        model.observe(task(512), on(SP1), seconds)
    (measured,) = model.measured.values()
    assert measured.spread == pytest.approx(0.1)


def test_the_version_changes_with_the_answers_and_only_then() -> None:
    model = TableCostModel(table())
    seen = []
    for seconds in (0.31, 0.31, 0.31, 0.31, 9.0, 0.155):
        model.observe(task(512), on(SP1), seconds)
        seen.append((model.version, model.task_s(task(512), on(SP1))))
    versions, times_s = zip(*seen, strict=True)
    assert times_s == (0.155, 0.155, 0.31, 0.31, 0.31, 0.31) and versions == (0, 0, 1, 1, 1, 1)


def test_what_is_unknown_stays_so_and_names_who_asks() -> None:
    model = TableCostModel(table())
    for request_id in ("a", "b"):
        with pytest.raises(UnknownCostError, match="at sp8, known: sp1") as caught:
            model.task_s(task(request_id=request_id), on(ParallelSpec(8)))
        assert caught.value.request_id == request_id


def test_a_change_is_followed_within_a_window() -> None:
    model = TableCostModel(table())
    for _ in range(100):
        model.observe(task(512), on(SP1), 0.2)
    for _ in range(8):
        model.observe(task(512), on(SP1), 0.4)
    assert model.task_s(task(512), on(SP1)) == pytest.approx(0.4)


def test_observing_what_the_table_lacks_is_harmless() -> None:
    model = TableCostModel(table())
    model.observe(task(model="flux"), on(SP1), 1.0)
    assert not model.measured


# Any number of sizes


def sizes(count: int) -> Iterator[Shape]:
    return (Shape(16 * (1 + index % 256), 16 * (1 + index // 256)) for index in range(count))


@pytest.mark.parametrize("make", [lambda: TableCostModel(sized_table()), NominalCostModel])
def test_what_is_remembered_of_many_sizes_has_a_bound(make: Callable[[], CalibratedCostModel]) -> None:
    model = make()
    highest = 0
    for shape in sizes(2 * MAX_ANSWERS):
        view = task(shape)
        model.observe(view, on(SP1), 0.1)
        model.migration_s(view, on(SP2))
        for batch in (1, 3):  # for three the table has no time
            with suppress(UnknownCostError):
                model.task_s(view, on(SP2), batch)
        highest = max(highest, model.num_entries)
    # Times with and without correction, copies, and a few entries that do not depend on the size.
    assert MAX_ANSWERS < highest <= MAX_KEYS + 3 * MAX_ANSWERS + 10


def test_what_is_missing_is_remembered_once_for_all_sizes() -> None:
    model = TableCostModel(table())
    for shape in sizes(100):
        with pytest.raises(UnknownCostError):
            model.task_s(task(shape), on(SP1), batch=3)
    assert model.num_entries == 1


def test_what_is_measured_now_stays_and_the_rest_falls_back_to_the_table() -> None:
    """However many other sizes come by meanwhile."""
    model = TableCostModel(table())
    for _ in range(3):
        model.observe(task(512), on(SP1), 0.31)
        model.observe(task(512), on(SP2), 0.31)
    for number, shape in enumerate(sizes(2 * MAX_KEYS)):
        model.observe(task(shape), on(SP4), 0.1)
        if number % (MAX_KEYS // 4) == 0:
            model.observe(task(512), on(SP1), 0.31)
    assert model.task_s(task(512), on(SP1)) == pytest.approx(0.31)
    measured = model.measured
    assert measured[CostKey("qwen", TaskKind.DENOISE, Shape(512, 512), False, SP1, 1)].count > WINDOW // 2
    assert CostKey("qwen", TaskKind.DENOISE, Shape(512, 512), False, SP2, 1) not in measured
    model.observe(task(512), on(SP4), 0.5)
    model.observe(task(512), on(SP4), 0.5)
    model.observe(task(512), on(SP4), 0.5)  # a correction changes: answers are worked out anew
    assert model.task_s(task(512), on(SP2)) == 0.161


def test_what_was_learned_of_all_sizes_outlasts_any_number_of_them() -> None:
    model = NominalCostModel()
    decode = task(512, TaskKind.DECODE)
    guess_s = model.task_s(decode, on(SP1))
    model.observe(decode, on(SP1), 3 * guess_s)
    step_s = model.task_s(task(512), on(SP1))
    for shape in sizes(2 * MAX_KEYS):
        model.observe(task(shape), on(SP1), 0.1)
        model.task_s(task(shape, TaskKind.DECODE), on(SP1))  # as a policy asks about a new request
    assert model.task_s(decode, on(SP1)) == pytest.approx(3 * guess_s)
    assert model.task_s(task(512), on(SP1)) != step_s


# Without a table


def test_nominal_costs_follow_the_stated_law() -> None:
    model = NominalCostModel()
    step_s = model.task_s(task(512), on(SP1))
    assert model.task_s(task(1024), on(SP1)) == pytest.approx(4 * step_s)
    assert model.task_s(task(512, cfg=True), on(SP1)) == pytest.approx(2 * step_s)
    assert step_s / model.task_s(task(512), on(SP2)) == pytest.approx(1.82, abs=0.02)
    assert step_s / model.task_s(task(512), on(SP4)) == pytest.approx(3.33, abs=0.05)
    guided = task(512, cfg=True)
    assert model.task_s(guided, on(ParallelSpec(1, 2))) < model.task_s(guided, on(SP2))
    assert model.candidates(task()) == (SP1, SP2, SP4)
    assert model.migration_s(task(), on(SP2)) == 0.0


def test_nominal_costs_learn_the_key_then_the_task_then_everything() -> None:
    model = NominalCostModel()
    guess = {kind: model.task_s(task(512, kind), on(SP1)) for kind in TaskKind}
    wide = model.task_s(task(1024), on(SP4))
    for seconds in (90.0, 3 * guess[TaskKind.DENOISE], 3 * guess[TaskKind.DENOISE]):
        model.observe(task(512), on(SP1), seconds)
    assert model.task_s(task(512), on(SP1)) == pytest.approx(3 * guess[TaskKind.DENOISE])
    assert model.task_s(task(1024), on(SP4)) == pytest.approx(3 * wide)
    assert model.task_s(task(512, TaskKind.DECODE), on(SP1)) == pytest.approx(3 * guess[TaskKind.DECODE])
    model.observe(task(512, TaskKind.DECODE), on(SP1), guess[TaskKind.DECODE])
    assert model.task_s(task(512, TaskKind.DECODE), on(SP1)) == pytest.approx(guess[TaskKind.DECODE])
    assert model.task_s(task(512), on(SP1)) == pytest.approx(3 * guess[TaskKind.DENOISE])
