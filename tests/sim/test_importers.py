"""Logs of production services as traces: both formats from invented rows, and what is said of bad ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfdit.cli import main as cli
from gfdit.core import ParallelSpec, Shape, trajectory
from gfdit.core import events as ev
from gfdit.observe.recording import RecordingHeader, RecordingWriter
from gfdit.sim.arrivals import Pace
from gfdit.sim.importers import spread_ties
from gfdit.sim.log_traces import LoggedRequest
from gfdit.sim.replay import make_control_plane
from gfdit.sim.shares import Shares, shape_of
from gfdit.sim.trace import TraceRequest, read_trace
from tests.sim.tables import AROUND_S, line, table

GENTD26 = """gmt_create,predict_type,num_images_per_prompt,num_inference_steps,checkpoint_model_version_id
2024-11-15 18:00:10,TXT_2_IMG,1.0,4.0,M1
2024-11-15 18:00:00,TXT_2_IMG,2.0,2.0,M0
2024-11-15 18:00:10,IMG_2_IMG,1.0,9.0,M1
2024-11-15 18:00:10,TXT_2_IMG,1.0,6.0,M2
2024-11-15 18:00:11,TXT_2_IMG,,,M2
"""
AZURE = """TIMESTAMP,Model,ContextTokens,Pixels,Wide
2023-11-16 18:15:46.6805900,chat,374,512,1024
2023-11-16 18:15:46.6805900,other,396,,
"""
OUT = "--costs c.json --out w.jsonl"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table().save("c.json")
    table(model="wide").save("d.json")
    Path("g.csv").write_text(GENTD26)
    Path("a.csv").write_text(AZURE)
    return tmp_path


def imported(arguments: str) -> list[TraceRequest]:
    assert cli.main(["workload", "import", *OUT.split(), *arguments.split()]) == 0
    return read_trace("w.jsonl")


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], int]) -> str:
    assert call() == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not Path("w.jsonl").exists()
    return error


def test_text_to_image_requests_of_gentd26(here: Path) -> None:
    """In order of time, without what is no such request and what has no steps; ties are half a second apart."""
    trace = imported("g.csv --format gentd26 --sizes 512 --deadline-factors 1.5")
    assert [request.arrival_s for request in trace] == [0.0, 10.0, 10.5]
    assert [request.num_steps for request in trace] == [2, 4, 6]
    assert [request.deadline_s for request in trace] == [1.5 * (AROUND_S + 2.0 * steps) for steps in (2, 4, 6)]
    assert {(request.slo_class, request.height, request.width) for request in trace} == {("512", 512, 512)}
    kept = imported("g.csv --format gentd26 --ties keep --select 1: --columns images=num_images_per_prompt")
    assert [request.arrival_s for request in kept] == [0.0, 10.0, 10.0]  # the second of two images is the first
    assert [request.num_steps for request in kept] == [2, 4, 6]


def test_a_window_at_a_load(here: Path) -> None:
    """One rank is busy for as long as the window lasts, times load and ranks."""
    trace = imported("g.csv --format gentd26 --load 0.5 --ranks 4")
    work_s = sum(AROUND_S + 2.0 * request.num_steps for request in trace)
    assert trace[-1].arrival_s == pytest.approx(work_s / (0.5 * 4), abs=1e-6)
    trace = imported("g.csv --format gentd26 --per-min 6")
    assert [request.arrival_s for request in trace] == pytest.approx([0.0, 30 * 10 / 10.5, 30.0])
    assert imported("g.csv --format gentd26 --time-factor 0.1")[-1].arrival_s == 1.05


def test_any_csv_says_what_its_columns_say(here: Path) -> None:
    columns = "--columns arrival=TIMESTAMP,model=Model,height=Pixels,width=Wide"
    trace = imported(f"a.csv {columns} --costs c.json,d.json --model-names chat=wide,*=m --sizes m=256 --steps 3")
    assert [(one.model, one.height, one.width, one.slo_class) for one in trace] == [
        ("wide", 512, 1024, "wide/512x1024"),
        ("m", 256, 256, "m/256"),
    ]
    assert [one.arrival_s for one in trace] == [0.0, 0.0]  # not whole seconds: they did arrive together
    assert [one.slo_class for one in imported(f"a.csv {columns},class=Model --model-names *=m")] == [
        "chat",
        "other",
    ]
    Path("b.csv").write_text("t,n\n" + "15.11.2024 10:00,1\n15.11.2024 10:01,1\n")
    form = ["--time-format", "%d.%m.%Y %H:%M"]
    argv = ["workload", "import", "b.csv", "--columns", "arrival=t,steps=n", *form, *OUT.split()]
    assert cli.main(argv) == 0
    assert [request.arrival_s for request in read_trace("w.jsonl")] == [0.0, 60.0]


def test_what_the_log_does_not_say_is_drawn_as_asked_for(here: Path) -> None:
    Path("many.csv").write_text("t\n" + "".join(f"{second}\n" for second in range(2000)))
    argument = "many.csv --columns arrival=t --sizes 256:.2,512:.3,1024:.5 --steps 2:3,4 --deadline-factors 1 2 3"
    trace = imported(argument)
    assert trace == imported(argument) != imported(f"{argument} --seed 1")
    counts = Counter(request.slo_class for request in trace)
    assert [counts[name] / 2000 for name in ("256", "512", "1024")] == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
    assert Counter(request.num_steps for request in trace)[2] == pytest.approx(1500, rel=0.05)
    paced = imported(f"{argument} --per-min 6000")
    assert [(one.slo_class, one.num_steps) for one in paced] == [(one.slo_class, one.num_steps) for one in trace]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("", "a.csv: no column 'gmt_create', there are: TIMESTAMP, Model, ContextTokens, Pixels, Wide"),
        ("--format csv", "which column is the time of arrival? Give arrival=COLUMN"),
        ("--format csv --columns time=t", "a log has no field 'time', known: arrival, model, steps, size"),
        ("--format csv --columns arrival", "--columns takes FIELD=COLUMN with commas between them, got 'arrival'"),
        ("--format csv --columns arrival=Model", "a.csv:2: column 'Model' must be seconds or a time such as"),
        ("--format csv --columns arrival=Pixels", "a.csv:3: column 'Pixels' must be a time, it is empty"),
        (
            "--format csv --columns arrival=TIMESTAMP,model=Model",
            "a.csv:2: column 'Model' must be a model with costs (m) or have a name of one given, got 'chat'",
        ),
        (
            "--format csv --columns arrival=TIMESTAMP,steps=Model",
            "a.csv:2: column 'Model' must be a whole number from 1 to 100000, got 'chat'",
        ),
        ("--format csv --columns arrival=TIMESTAMP,width=Wide", "height and width are needed together"),
        ("--format csv --columns arrival=TIMESTAMP --load 1 --ranks 2", "all requests arrive at one time"),
        ("--format csv --columns arrival=TIMESTAMP --select 7:", "a.csv: no request is left of 2"),
        ("--format csv --columns arrival=TIMESTAMP --where Model", "must be COLUMN=VALUE or COLUMN!=VALUE"),
        ("--load 1", "a load needs the number of ranks it is relative to"),
        ("--load 1 --ranks 2 --per-min 3", "give one of a load and a number of requests a minute"),
        ("--select 5", "--select takes FIRST:END, such as 0:3000 or 22000:, got '5'"),
        ("--sizes 512:x", "--sizes: the share of '512' must be a positive number, got 'x'"),
        ("--sizes 51.2", "a size must be SIDE, HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got '51.2'"),
        ("--sizes big=512", "--sizes: no cost for model 'big', known: m"),
        ("--sizes 256,512 --deadline-factors 1 2 3", "one for each of 2 sizes, got 3"),
        ("--models other", "no cost for model 'other', known: m"),
        ("--steps 0", "--steps: must be a whole number from 1 to 100000, got '0'"),
        ("--costs c.json c2.json", "model 'm' is in two cost tables: c.json and c2.json"),
        ("--cv 2", "unrecognized: --cv 2; allowed: --help, --format, --columns"),
    ],
)
def test_mistakes(here: Path, change: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    table().save("c2.json")
    argv = ["workload", "import", "a.csv", "--format", "gentd26", *OUT.split(), *change.split()]
    assert told in error_of(capsys, lambda: cli.main(argv))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_ties_are_spread_within_their_second_and_stay_in_order(seconds: list[int]) -> None:
    logged = [
        LoggedRequest(float(second), num_steps=index) for index, second in enumerate(sorted(seconds), start=1)
    ]
    spread = spread_ties(logged)
    times_s = [request.arrival_s for request in spread]
    assert len(set(times_s)) == len(times_s) and times_s == sorted(times_s)
    assert [(int(one.arrival_s), one.num_steps) for one in spread] == [
        (one.arrival_s, one.num_steps) for one in logged
    ]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20).map(sorted), st.floats(0.1, 3.0), st.integers(1, 8))
def test_a_pace_keeps_the_pattern_and_meets_the_load(arrivals_s: list[float], load: float, num_ranks: int) -> None:
    if arrivals_s[-1] - arrivals_s[0] < 1e-3:
        return
    times_s = Pace(load=load, num_ranks=num_ranks).times_s(arrivals_s, 1000.0)
    assert times_s[0] == 0 and times_s == sorted(times_s)
    assert 1000.0 / (times_s[-1] * num_ranks) == pytest.approx(load, rel=1e-5)
    factor = times_s[-1] / (arrivals_s[-1] - arrivals_s[0])
    assert times_s == pytest.approx([factor * (at_s - arrivals_s[0]) for at_s in arrivals_s], abs=2e-6)


def test_shares() -> None:
    shares = Shares.parse("480x832x81:3,1024", shape_of, "sizes")
    assert [str(shape) for shape in shares.values] == ["480x832x81", "1024x1024"] and shares.weights == (3, 1)
    assert [shares.at(position).height for position in (0.0, 0.74, 0.76, 0.999)] == [480, 480, 1024, 1024]
    with pytest.raises(ValueError, match="512x512 is there twice"):
        Shares.parse("512,512x512", shape_of, "sizes")


# Recordings


def recording(path: str, events: list[ev.Event]) -> None:
    header = RecordingHeader(model="m", num_ranks=2, policy="fcfs")
    writer, plane = RecordingWriter(path, header), make_control_plane(header, {})
    for event in events:
        with suppress(ValueError):
            writer.handle(plane, event, 100.0)
    writer.close()


def test_what_a_server_recorded_is_a_trace_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line("late", 3.5, slo_class="S", priority=2),
        line("first", 1.25, num_steps=7, deadline_s=4.5, height=256),
        line("again", 2.0),
    ]
    arrived = [
        ev.RequestArrived(one.request(100.0), trajectory(one.id, one.num_steps, (ParallelSpec(1),)))
        for one in lines
    ]
    # Told twice: refused. Of another one's time: another request. One for two images, of which a part is computed.
    other = replace(lines[2], arrival_s=5.0)
    several = other.request(100.0)
    shape = Shape(512, 512, num_outputs=2, computed_percent=30)
    several = msgspec.structs.replace(several, shape=shape, model="n")
    graph = trajectory(several.id, 2, (ParallelSpec(1),))
    recording("r", [*arrived, arrived[0], ev.RequestCancelled("again"), ev.RequestArrived(several, graph)])
    command = ["workload", "from-recording", "r", "--model-names", "n=wide", "--out", "w.jsonl"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert out == "w.jsonl: 5 requests in 4 s: 4 default, 1 S; of m, wide; 1 edits under a mask compute all here\n"
    expected = [lines[1], replace(lines[2], id="again@1"), lines[0]]
    expected += [replace(other, id=f"again@3.{index}", model="wide") for index in (0, 1)]
    assert read_trace("w.jsonl") == [replace(one, arrival_s=one.arrival_s - 1.25) for one in expected]
    assert cli.main(["sim", "--trace", "w.jsonl", "--costs", "c.json", "d.json", "--ranks", "2"]) == 0


def test_a_file_that_is_no_recording(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording("empty", [])
    for name, told in (("a.csv", "a.csv: not a recording"), ("empty", "empty: the recording has no requests")):
        argv = ["workload", "from-recording", name, "--out", "w.jsonl"]
        assert told in error_of(capsys, lambda argv=argv: cli.main(argv))  # type: ignore[misc]
