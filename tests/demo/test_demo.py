"""The demo's own functions; the demo as a whole is run by `make demo`."""

import importlib.util
import io
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gfdit.cli.replay import Outcome
from gfdit.cli.server_process import ServerError
from gfdit.core import ParallelSpec, Request, Shape, trajectory
from gfdit.core.events import RequestArrived
from gfdit.observe.recording import RecordingHeader, RecordingWriter
from gfdit.observe.timeline import Span
from gfdit.sim.trace import TraceRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def png(value: int, size: int = 8) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), value, dtype=np.uint8)).save(data, "PNG")
    return data.getvalue()


def outcome(name: str, sent_s: float, finish_s: float, image: bytes | None = None, status: int = 200) -> Outcome:
    return Outcome(name, name[0], sent_s, 1.5, sent_s, finish_s, status, "" if status == 200 else "no", image)


def request_spans(server_id: str, start_s: float, degrees: list[int]) -> list[Span]:
    """A step a second."""
    return [
        Span(rank, f"{server_id}/denoise/{i}", server_id, "denoise", i, sp, 1, ranks, start_s + i, start_s + i + 1)
        for i, sp in enumerate(degrees)
        for ranks in [tuple(range(sp))]
        for rank in ranks
    ]


def test_all_times_are_multiples_of_the_measured_steps(demo: ModuleType) -> None:
    step_s = {"S": 0.1, "M": 0.2, "L": 0.3}
    trace, slow = demo.demo_trace(step_s), demo.demo_trace({name: 10 * value for name, value in step_s.items()})
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    assert {request.slo_class for request in trace} == {"S", "M", "L"}
    for request, other in zip(trace, slow, strict=True):
        assert request.deadline_s == pytest.approx(demo.SLO_SCALE * request.num_steps * step_s[request.slo_class])
        assert other.deadline_s == pytest.approx(10 * request.deadline_s)
        assert other.arrival_s == pytest.approx(10 * request.arrival_s)


def test_steps_are_those_of_the_faster_of_two_requests_alone(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s = iter([9.0, 8.0, 48.0, 6.0, 16.0, 24.0])

    def play(server: None, name: str, trace: list[TraceRequest]) -> list[Outcome]:
        (request,) = trace
        assert request.deadline_s is None
        return [outcome(request.id, 0.0, next(took_s))]

    monkeypatch.setattr(demo, "play", play)
    assert demo.measure_steps(None, "stock") == {"S": 1.0, "M": 1.0, "L": 1.0}


def test_spans_get_the_client_s_names_and_clock(demo: ModuleType) -> None:
    spans = [*request_spans("img-0", 90.0, [1, 1]), *request_spans("img-1", 100.0, [1, 2])]
    names = {"img-0": "S-alone", "img-1": "S02"}
    named = demo.named_spans(spans, names, [outcome("S02", 0.5, 3.0)])
    assert {span.request for span in named} == {"S02"}
    assert (named[0].start_s, named[-1].end_s) == (0.5, 2.5)


def test_the_client_s_names_are_in_the_recording(demo: ModuleType, tmp_path: Path) -> None:
    header = RecordingHeader(model="m", num_ranks=1, policy="triage")
    with closing(RecordingWriter(tmp_path / "r.jsonl", header)) as recording:
        request = Request("img-1", "m", Shape(64, 64), 1, 0.0, slo_class="S02")
        silent: Any = SimpleNamespace(handle=lambda event, now_s: [])
        recording.handle(silent, RequestArrived(request, trajectory("img-1", 1, (ParallelSpec(1),))), 0.0)
    assert demo.client_ids(tmp_path / "r.jsonl") == {"img-1": "S02"}


def test_the_stock_engine_is_drawn_one_request_at_a_time(demo: ModuleType) -> None:
    spans = demo.client_spans([outcome("a", 0.0, 2.0), outcome("b", 1.0, 3.0), outcome("c", 7.0, 8.0)])
    lane = [(span.request, span.start_s, span.end_s) for span in spans if span.rank == 3]
    assert lane == [("a", 0.0, 2.0), ("b", 2.0, 3.0), ("c", 7.0, 8.0)]
    assert len(spans) == 3 * demo.NUM_RANKS


def test_the_table_says_what_is_gained(demo: ModuleType) -> None:
    stock = [outcome("a", 0.0, 1.0), outcome("b", 0.0, 2.0), outcome("c", 0.0, 6.0)]
    ours = [outcome("a", 0.0, 1.0), outcome("b", 0.0, 1.25), outcome("c", 0.0, 2.25)]
    header, met, mean, p95 = (" ".join(row.split()) for row in demo.table(stock, ours).splitlines())
    assert header == "stock gfdit"
    assert met == "deadlines met 1 of 3 2 of 3 +1"
    assert mean == "mean latency 3.00 s 1.50 s 0.50 times stock's"
    assert p95.startswith("95th percentile of latency 5.60 s 2.15 s 0.38 times")


def test_comparing_images(demo: ModuleType) -> None:
    stock = [outcome("a", 0, 1, png(10)), outcome("b", 0, 1, png(20))]
    ours = [outcome("a", 0, 1, png(10)), outcome("b", 0, 1, png(23))]
    sentence = demo.compare_images(stock, ours)
    assert "1 of 2 are bit-identical" in sentence
    assert "3/255" in sentence


def test_the_request_that_changed_most_often(demo: ModuleType) -> None:
    spans = [*request_spans("S2", 0.0, [1, 2, 2]), *request_spans("L1", 0.0, [1, 2, 2, 4, 1])]
    sentence = demo.most_changes(spans)
    assert "L1 changed its parallelism 3 times" in sentence
    assert "SP1 from step 0, SP2 from step 1, SP4 from step 3, SP1 from step 4" in sentence


def test_contact_sheet(demo: ModuleType, tmp_path: Path) -> None:
    stock = [outcome("a", 0, 1, png(250)), outcome("b", 0, 1, png(70))]
    ours = [outcome("a", 0, 1, png(250)), outcome("b", 0, 1, png(7))]
    demo.contact_sheet(stock, ours, tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    for value, num_images in ((250, 2), (70, 1), (7, 1)):
        assert 0 <= (sheet == value).all(axis=2).sum() - num_images * 128 * 128 < 200, (
            "text is grey here and there"
        )


def test_a_server_that_does_not_start_is_an_error(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the log's tail, and an exit status that is not 0."""

    def start(command: list[str], port: int, log_path: Path) -> None:
        assert str(tmp_path / "model") in command
        raise ServerError("server ended with status 2\nno such flag")

    monkeypatch.setattr(demo, "build_model", lambda out: out / "model")
    monkeypatch.setattr(demo, "start_server", start)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    assert demo.main() == 1
    assert "server ended with status 2\nno such flag" in capsys.readouterr().err
