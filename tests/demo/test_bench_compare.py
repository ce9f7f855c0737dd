"""Several servers side by side: the table, what makes results incomparable, and the pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from gfdit.cli.bench_compare import largest_difference
from gfdit.cli.main import main
from gfdit.sim.trace import TraceRequest, write_trace
from tests.support.fake_image_server import FakeServer, fake_server, image_answer

__all__ = ["fake_server"]


def png_bytes(value: int, size: int = 8) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (size, size), (value, value, value)).save(data, "PNG")
    return data.getvalue()


def video_bytes(value: int) -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=8)
        stream.width = stream.height = 32
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), value, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return data.getvalue()


def trace(*names: str) -> list[TraceRequest]:
    return [TraceRequest(name, 0.0, "m", 32, 32, 1, 4, slo_class=name[0], deadline_s=60.0) for name in names]


def measure(server: FakeServer, folder: Path, label: str, requests: list[TraceRequest]) -> str:
    write_trace(folder / "t.jsonl", requests)
    argv = ["bench", "serve", "--base-url", server.base_url, "--trace", str(folder / "t.jsonl"), "--label", label]
    argv += ["--json", str(folder / f"{label}.json"), "--images", str(folder / label)]
    main(argv)
    return str(folder / f"{label}.json")


def test_a_row_per_server_and_the_pictures(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = trace("S1", "S2", "L1")
    fake_server.answer = lambda body: image_answer(png_bytes(10))
    first = measure(fake_server, tmp_path, "one", requests)
    asked: list[int] = []

    def other(body: dict[str, object]) -> tuple[int, str]:
        asked.append(1)
        return (503, "full") if len(asked) == 1 else image_answer(png_bytes(10 if len(asked) == 2 else 17))

    fake_server.answer = other
    second = measure(fake_server, tmp_path, "two", requests)
    out = tmp_path / "report" / "r.md"
    assert main(["bench", "compare", first, second, "--out", str(out)]) == 0
    text = out.read_text()
    assert "| one | 3 | 100.0% |" in text and "| two | 2 | 66.7% |" in text
    assert "| S | one | 2 |" in text and "| L | two |" in text
    assert "- two: 1 x HTTP 503: full" in text
    assert "1 of 2 pictures have the same values as one's" in text and "is 7 of 255" in text
    assert (out.parent / "r_latencies.png").exists()
    sheet = np.asarray(Image.open(out.parent / "r_pictures.png"))
    for value in (10, 17):
        assert (sheet == value).all(axis=2).any()
    assert "| one | 3 |" in capsys.readouterr().out


def test_results_of_other_requests_do_not_compare(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = measure(fake_server, tmp_path, "one", trace("a", "b"))
    second = measure(fake_server, tmp_path, "two", trace("a", "c"))
    out = ["--out", str(tmp_path / "r.md")]
    assert main(["bench", "compare", first, second, *out]) == 2
    assert "one and two were not asked the same: b and 1 more" in capsys.readouterr().err
    assert main(["bench", "compare", first, first, *out]) == 2
    assert "a --label of its own" in capsys.readouterr().err
    (tmp_path / "other.json").write_text(json.dumps({"policy": "x"}))
    assert main(["bench", "compare", str(tmp_path / "other.json"), *out]) == 2
    assert "other.json is not a result of `gfdit bench serve`" in capsys.readouterr().err


def test_differences_of_pictures_and_videos(tmp_path: Path) -> None:
    def write(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    dark, light = write("a.png", png_bytes(10)), write("b.png", png_bytes(200))
    assert (largest_difference(dark, dark), largest_difference(dark, light)) == (0, 190)
    assert largest_difference(dark, write("c.png", png_bytes(10, size=16))) is None
    black, white = write("a.mp4", video_bytes(0)), write("b.mp4", video_bytes(255))
    assert largest_difference(black, black) == 0
    difference = largest_difference(black, white)
    assert difference is not None and difference > 200
