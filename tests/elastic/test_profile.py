"""`gfdit profile`: what it measures, what it skips, and what it refuses.

Most of it on the engine of the folder, in place of a server that would be started for it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from gfdit.cli import profile, profile_plan, profile_server
from gfdit.cli.main import main
from gfdit.cli.profile_server import ProfileServer, Wanted
from gfdit.core import ExecutionLayout, ParallelSpec, Request, Shape, TaskKind, TaskView, trajectory
from gfdit.core.cost.table import CostTable, TableCostModel
from gfdit.core.events import RequestArrived
from gfdit.observe.recording import RecordingReader
from gfdit.observe.samples import Samples
from gfdit.sim.graphs import GraphBuilder
from tests.support.images import Engine, ImageRequest

FLAGS = ["--", "--dtype", "float32", "--enforce-eager"]
MODEL = "qwen-image"  # as the engine calls it, by its folder
QUICK = ["--spread", "0.9", "--min-reps", "2", "--max-reps", "2"]


class EngineServer(ProfileServer):
    """Requests go to the engine as they are, not over HTTP; what it measures is read as ever."""

    def __init__(self, engine: Engine, recording: RecordingReader) -> None:
        self.samples = Samples()
        self._engine = engine
        self._reader = recording
        list(recording.entries())  # of other tests

    def run(self, requests: Sequence[Wanted], mask_image: bytes | None = None) -> list[RequestArrived]:
        known = set(self.samples.arrived)
        self._engine.images(
            [
                ImageRequest(
                    wanted.shape.height,
                    wanted.shape.width,
                    wanted.num_steps,
                    negative_prompt="blurry" if wanted.cfg else None,
                    script=wanted.script,
                )
                for wanted in requests
            ]
        )
        self._read_until_completed(len(known) + len(requests))
        return [arrived for name, arrived in self.samples.arrived.items() if name not in known]


@pytest.fixture(scope="module")
def server(engine: Engine, recording_path: Path) -> Iterator[ProfileServer]:
    with RecordingReader(recording_path) as recording:
        yield EngineServer(engine, recording)


@pytest.fixture
def command(server: ProfileServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A quick profile that finds the server running already."""
    monkeypatch.setattr(profile_server, "ProfileServer", lambda *args: nullcontext(server))
    return ["profile", str(model), "--ranks", "4", "--out", str(tmp_path / "c.json"), *QUICK]


def test_everything_is_measured_once(command: list[str], server: ProfileServer, tmp_path: Path) -> None:
    assert main([*command, "--shape", "64x64", "--cfg", "off", "--batch", "1", "2", *FLAGS]) == 0
    table = CostTable.load(tmp_path / "c.json")
    found = {(e.task, e.cfg, str(e.parallel), e.batch) for e in table.entries}
    assert len(found) == len(table.entries)
    steps = {(TaskKind.DENOISE, False, f"sp{sp}", batch) for sp in (1, 2, 4) for batch in (1, 2)}
    assert found == steps | {(kind, False, "sp1", 1) for kind in (TaskKind.ENCODE, TaskKind.DECODE)}
    assert table.migration_latency_s > 0.0001
    (latents_bytes,) = (size.num_bytes for size in table.artifacts if size.artifact == "latents")
    num_bytes = 4 * 4 * 64 * 4  # tokens of 16 x 16 pixels, channels, float32
    assert num_bytes < latents_bytes < 20 * num_bytes

    request = Request("r", MODEL, Shape(64, 64), 1, 0.0)
    step = TaskView.of(request, trajectory("r", 1, (ParallelSpec(1), ParallelSpec(2))).tasks[2])
    cost = TableCostModel(table)
    assert [spec.sp for spec in cost.candidates(step)] == [1, 2]
    assert cost.task_s(step, ExecutionLayout((0,)), batch=2) > 0

    # Once more: nothing is measured again, unless it is new.
    before = (tmp_path / "c.json").read_bytes()
    num_requests = len(server.samples.arrived)
    assert main([*command, "--shape", "64x64", "--cfg", "off", "--batch", "1", "2", *FLAGS]) == 0
    explored = 4
    assert len(server.samples.arrived) == num_requests + explored
    assert CostTable.load(tmp_path / "c.json").entries == table.entries
    assert main([*command, "--shape", "64x64", *FLAGS]) == 0
    longer = CostTable.load(tmp_path / "c.json")
    assert set(table.entries) < set(longer.entries)
    new = {(e.task, e.cfg, str(e.parallel), e.batch) for e in set(longer.entries) - set(table.entries)}
    guided = {f"{cfg}sp{sp}" for cfg in ("", "cfg2x") for sp in (1, 2, 4)} - {"cfg2xsp4"}
    steps = {(TaskKind.DENOISE, True, spec, 1) for spec in guided}
    assert new == steps | {(kind, True, "sp1", 1) for kind in (TaskKind.ENCODE, TaskKind.DECODE)}
    sizes = {(size.artifact, size.cfg): size.num_bytes for size in longer.artifacts}
    assert sizes["conditioning", True] > sizes["conditioning", False]
    assert before != (tmp_path / "c.json").read_bytes()


@pytest.mark.thorough
def test_what_masks_save_is_measured_and_known_to_cost_models(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    argv = ["profile", str(model), "--ranks", "2", "--model-name", "tiny", "--out", str(out), *QUICK]
    asked = ["--shape", "64x64", "256x256", "--cfg", "off", "--mask-ratio", "0.1", "0.5", "1"]
    assert main([*argv, *asked, *FLAGS]) == 0
    assert "steps of 256x256 under a mask: " in capsys.readouterr().out
    table = CostTable.load(out)
    (masked,) = table.masked_steps
    assert masked.model == "tiny" and 0 <= masked.unmasked_share < 0.9 and 0 < masked.r_squared <= 1
    cost = TableCostModel(table)
    requests = [Request("r", "tiny", Shape(256, 256, computed_percent=percent), 1, 0.0) for percent in (100, 20)]
    steps = [TaskView.of(each, trajectory("r", 1, (ParallelSpec(1),)).tasks[2]) for each in requests]
    full_s, masked_s = (cost.task_s(step, ExecutionLayout((0,))) for step in steps)
    assert masked_s == pytest.approx((masked.unmasked_share + (1 - masked.unmasked_share) * 0.2) * full_s)


@pytest.mark.thorough
def test_shared_decodes_are_measured_and_known_to_simulator_and_policies(model: Path, tmp_path: Path) -> None:
    """What fits a tile is decoded by one rank, what has more of them by either number, and so it is simulated."""
    out = tmp_path / "c.json"
    shapes = ["--shape", "64x64", "64x448", "--cfg", "off"]
    argv = ["profile", str(model), "--ranks", "2", "--model-name", "tiny", "--out", str(out), *QUICK, *shapes]
    assert main([*argv, *FLAGS, "--vae-use-tiling"]) == 0
    table = CostTable.load(out)
    one, two = ParallelSpec(1), ParallelSpec(2)
    decodes = {(e.shape, e.parallel): e.seconds for e in table.entries if e.task is TaskKind.DECODE}
    assert set(decodes) == {(Shape(64, 64), one), (Shape(64, 448), one), (Shape(64, 448), two)}

    cost = TableCostModel(table)
    builder = GraphBuilder(cost, num_ranks=2)
    for shape, specs in ((Shape(64, 64), (one,)), (Shape(64, 448), (one, two)), (Shape(128, 448), (one, two))):
        request = Request("r", "tiny", shape, 1, 0.0)
        decode = TaskView.of(request, builder.build(request).tasks[-1])
        assert decode.kind is TaskKind.DECODE
        assert decode.candidates == cost.candidates(decode) == specs, shape
        if (seconds := decodes.get((shape, two))) is not None:
            assert cost.task_s(decode, ExecutionLayout((1, 0), two)) == seconds


def test_an_interrupted_profile_keeps_what_it_has(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = EngineServer.run
    runs = []

    def interrupted(self: EngineServer, *args: object) -> object:
        runs.append(args)
        if len(runs) == 5:  # explored, copied twice, measured at one degree
            raise KeyboardInterrupt
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineServer, "run", interrupted)
    assert main([*command, "--shape", "64x64", "--cfg", "off", *FLAGS]) == profile.INTERRUPTED
    kept = CostTable.load(tmp_path / "c.json").entries
    assert 0 < len(kept) < 5
    assert f"keeps {len(kept)} entries" in capsys.readouterr().err
    assert main([*command, "--shape", "64x64", "--cfg", "off", *FLAGS]) == 0
    assert set(kept) < set(CostTable.load(tmp_path / "c.json").entries)


def test_a_model_without_guidance(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_plan.Profiler, "explore", lambda *args: None)
    assert main([*command, "--cfg", "on", *FLAGS]) == 2
    assert "has no guidance that could be measured" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_a_table_of_other_hardware_is_not_mixed_with_this(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gfdit.sim.costs.published_costs import qwen_image_h20

    qwen_image_h20().save(tmp_path / "c.json")
    assert main([*command, *FLAGS]) == 2
    assert "is of '8 x NVIDIA H20', this is" in capsys.readouterr().err
    table = replace(qwen_image_h20(), hardware=profile.hardware())
    table.save(tmp_path / "c.json")
    assert main([*command, *FLAGS]) == 2
    assert "not 'gfdit profile, all ranks busy with all shapes': choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--shape", "64"], "'64' is not of the form HEIGHTxWIDTH"),
        (["--shape", "0x64"], "'0x64' is not of the form HEIGHTxWIDTH"),
        (["--shape", "64x64x0"], "'64x64x0' is not of the form HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES"),
        (["--extra-params", "{"], "'{' is not a JSON object of parameters of the model"),
        (["--extra-params", "[1]"], "'[1]' is not a JSON object of parameters of the model"),
        (["--extra-params", '{"gfdit": {}}'], "is not a JSON object of parameters of the model"),
        (["--cfg", "maybe"], "choose from"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--mask-ratio", "0.1", "0.5", "1.1"], "--mask-ratio must be three numbers or more, above 0"),
        (["--mask-ratio", "0.1", "0.5"], "--mask-ratio must be three numbers or more, above 0"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--spread", "0"], "--spread must be between 0 and 1, got 0.0"),
        (["--min-reps", "1"], "--min-reps must be at least 2"),
        (["--min-reps", "9", "--max-reps", "4"], "at most --max-reps, got 9 and 4"),
    ],
)
def test_mistakes(
    wrong: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(model), "--ranks", "2", "--out", str(tmp_path / "c.json"), *wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gfdit profile: error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "./no-model", "--ranks", "2", "--out", str(tmp_path / "c.json")]) == 2
    assert "there is no checkpoint directory ./no-model" in capsys.readouterr().err
