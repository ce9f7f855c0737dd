"""The demo's own functions; the demo as a whole is run by `make demo`."""

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from gfdit.cli.replay import Outcome
from gfdit.observe.analysis import match_requests
from gfdit.observe.images import ImagePair, contact_sheet, largest_difference
from gfdit.observe.timeline import Span, read_timeline

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


def test_the_trace_is_valid_and_its_warm_up_can_be_told_from_it(demo: ModuleType) -> None:
    trace = demo.demo_trace()
    assert trace == demo.demo_trace()
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    assert {request.slo_class for request in trace} == {"S", "M", "L"}
    steps = {request.slo_class: request.num_steps for request in trace}
    assert len(set(steps.values())) == 3, "sizes are told apart by their steps"
    assert all(request.num_steps not in steps.values() for request in demo.warm_up(trace))
    assert {request.height for request in demo.warm_up(trace)} == {request.height for request in trace}


def test_requests_are_matched_by_steps_and_order_of_completion() -> None:
    spans = [
        *request_spans("warm", 0, [1, 1]),
        *request_spans("x1", 10, [1, 2, 4]),
        *request_spans("x2", 11, [1, 1, 1]),
        *request_spans("y", 10, [1]),
    ]
    assert match_requests(spans, [("S1", 1), ("L1", 3), ("L2", 3)]) == {"y": "S1", "x1": "L1", "x2": "L2"}


def test_spans_get_the_trace_names_and_the_clock_of_the_replay(demo: ModuleType) -> None:
    trace = [request for request in demo.demo_trace() if request.slo_class == "S"][:1]
    name, steps = trace[0].id, trace[0].num_steps
    server = request_spans("img-1", 100.0, [1] * steps)
    spans = demo.named_spans(
        [*request_spans("warm", 90.0, [1, 1]), *server], [outcome(name, 0.5, steps + 0.6)], trace
    )
    assert {span.request for span in spans} == {name}
    assert spans[0].task == f"{name}/denoise/0"
    assert (spans[0].start_s, spans[-1].end_s) == (0.5, 0.5 + steps)
    assert demo.named_spans(server, [outcome(name, 0.5, 9.0, status=500)], trace) == []


def test_written_spans_are_the_same_when_read(demo: ModuleType, tmp_path: Path) -> None:
    move = Span(1, "L1/latents/2", "L1", "migrate", -1, 0, 0, (0, 1), 1.5, 1.75)
    spans = sorted([*request_spans("L1", 1.0, [1, 2]), move], key=lambda span: (span.start_s, span.rank))
    demo.write_spans(spans, tmp_path / "t.json")
    assert read_timeline(tmp_path / "t.json") == spans


def test_the_stock_engine_is_drawn_one_request_at_a_time(demo: ModuleType) -> None:
    spans = demo.client_spans([outcome("a", 0.0, 2.0), outcome("b", 1.0, 3.0), outcome("c", 7.0, 8.0)])
    lane = [(span.request, span.start_s, span.end_s) for span in spans if span.rank == 3]
    assert lane == [("a", 0.0, 2.0), ("b", 2.0, 3.0), ("c", 7.0, 8.0)]
    assert len(spans) == 3 * demo.NUM_RANKS


def test_table(demo: ModuleType) -> None:
    run = demo.Run(
        "stock", [outcome("a", 0.0, 1.0), outcome("b", 1.0, 4.0), outcome("c", 2.0, 3.0, status=500)], []
    )
    header, row = demo.table([run]).splitlines()
    assert "deadlines met" in header
    assert row.split() == ["stock", "0.50", "2.00", "s", "2.90", "s", "1", "of", "3"]


def test_comparing_images(demo: ModuleType) -> None:
    stock = [outcome("a", 0, 1, png(10)), outcome("b", 0, 1, png(20)), outcome("c", 0, 1, None, status=500)]
    ours = [outcome("a", 0, 1, png(10)), outcome("b", 0, 1, png(23)), outcome("c", 0, 1, png(5))]
    sentence = demo.compare_images(stock, ours)
    assert "1 of 2 are bit-identical" in sentence
    assert "3/255" in sentence
    assert largest_difference(png(0), png(0, size=4)) == 255


def test_what_to_see(demo: ModuleType) -> None:
    sentence = demo.what_to_see(request_spans("L1", 0.0, [1, 2, 2, 4]))
    assert "L1 goes from 1 to 2 to 4 ranks" in sentence
    assert "SP1 from step 0, SP2 from step 1, SP4 from step 3" in sentence
    assert "no request went" in demo.what_to_see(request_spans("L1", 0.0, [4, 2, 1]))


def test_contact_sheet(tmp_path: Path) -> None:
    pairs = [ImagePair("a", png(255), png(0)), ImagePair("b", None, png(7))]
    contact_sheet(pairs, tmp_path / "sheet.png", title="stock left")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert (sheet == 0).all(axis=2).sum() >= 128 * 128
    assert 0 <= (sheet == 7).all(axis=2).sum() - 128 * 128 < 200, "text is grey here and there"
    assert 0 <= (sheet == 0xDD).all(axis=2).sum() - 128 * 128 < 200


def test_a_server_that_does_not_start_is_an_error_with_its_log(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log's tail is shown and the exit status is not 0."""
    monkeypatch.setattr(demo, "build_model", lambda out: out / "no-such-model")
    monkeypatch.setattr(demo, "STOCK_FLAGS", ("--no-such-flag",))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--only", "stock", "--out", str(tmp_path)])
    assert demo.main() == 1
    error = capsys.readouterr().err
    assert "server ended with status" in error
    assert "no-such-flag" in error
