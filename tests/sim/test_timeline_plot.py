"""Timeline pictures: they show what the timeline says, at least in colours and places."""

from pathlib import Path

import numpy as np
from PIL import Image

from gfdit.observe.timeline import Span
from gfdit.sim.timeline_plot import plot_comparison, plot_timeline


def span(rank: int, request: str, kind: str, start_s: float, end_s: float) -> Span:
    return Span(rank, f"{request}/{kind}", request, kind, 0, 1, 1, (rank,), start_s, end_s)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def area(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(axis=2).sum())


BLUE, ORANGE = (0x44, 0x77, 0xAA), (0xEE, 0x88, 0x66)


def test_bars_have_the_area_of_their_time(tmp_path: Path) -> None:
    spans = [span(0, "a", "denoise", 0.0, 3.0), span(1, "b", "denoise", 3.0, 4.0)]
    plot_timeline(spans, tmp_path / "t.png", title="two requests")
    picture = pixels(tmp_path / "t.png")
    assert 2.5 < area(picture, BLUE) / area(picture, ORANGE) < 3.5
    rows_of_a = np.nonzero((picture == BLUE).all(axis=2).sum(axis=1) > 200)[0]
    rows_of_b = np.nonzero((picture == ORANGE).all(axis=2).sum(axis=1) > 200)[0]
    assert rows_of_a.max() < rows_of_b.min(), "rank 0 is not above rank 1"


def test_encode_and_decode_are_hatched(tmp_path: Path) -> None:
    plot_timeline([span(0, "a", "denoise", 0.0, 1.0)], tmp_path / "plain.png")
    plot_timeline([span(0, "a", "decode", 0.0, 1.0)], tmp_path / "hatched.png")
    assert area(pixels(tmp_path / "hatched.png"), BLUE) < 0.9 * area(pixels(tmp_path / "plain.png"), BLUE)


def test_a_request_keeps_its_colour_in_a_comparison(tmp_path: Path) -> None:
    first = [span(0, "a", "denoise", 0.0, 1.0), span(0, "b", "denoise", 1.0, 2.0)]
    plot_comparison({"one": first, "two": [span(0, "b", "denoise", 0.5, 1.5)]}, tmp_path / "c.png", num_ranks=2)
    picture = pixels(tmp_path / "c.png")
    assert 1.7 < area(picture, ORANGE) / area(picture, BLUE) < 2.3


def test_nothing_to_show_is_still_a_picture(tmp_path: Path) -> None:
    plot_timeline([], tmp_path / "t.png", num_ranks=4)
    assert pixels(tmp_path / "t.png").shape[0] > 100


def test_many_requests_do_not_swamp_the_legend(tmp_path: Path) -> None:
    spans = [span(i % 4, f"r{i}", "denoise", i, i + 1) for i in range(200)]
    plot_timeline(spans, tmp_path / "t.png")
    height, width, _ = pixels(tmp_path / "t.png").shape
    assert height < width
