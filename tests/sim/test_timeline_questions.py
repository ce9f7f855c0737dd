"""Questions that benchmarks ask of a timeline, on small ones whose answers are plain to see."""

from dataclasses import replace

from benchmarks.boundaries import boundaries
from benchmarks.fifo_vs_stock import match_requests, time_by_part
from gfdit.observe.timeline import Span


def steps(request: str, degrees: list[int], start_s: float = 0.0) -> list[Span]:
    """One-second steps; step i on the first ``degrees[i]`` ranks."""
    return [
        Span(rank, f"{request}/denoise/{i}", request, "denoise", i, sp, 1, ranks, start_s + i, start_s + i + 1)
        for i, sp in enumerate(degrees)
        for ranks in [tuple(range(sp))]
        for rank in ranks
    ]


def test_boundaries_are_between_steps_of_one_request_on_one_layout() -> None:
    spans = [replace(span, end_s=span.end_s - 0.25) for span in steps("a", [1, 1, 2, 2])]
    assert [(b.after.step, b.after.rank, b.idle_s) for b in boundaries(spans)] == [
        (1, 0, 0.25),
        (3, 0, 0.25),
        (3, 1, 0.25),
    ]
    other = Span(0, "b/denoise/0", "b", "denoise", 0, 1, 1, (0,), 0.8, 0.9)
    assert [b.after.step for b in boundaries([*spans, other])] == [3, 3]
    decode = Span(0, "a/decode", "a", "decode", 0, 1, 1, (0,), 4.0, 5.0)
    assert len(boundaries([*spans, decode])) == 3


def test_time_by_part() -> None:
    encode = Span(0, "a/encode", "a", "encode", 0, 1, 1, (0,), 1.0, 1.5)
    late_rank = Span(3, "a/denoise/1", "a", "denoise", 1, 2, 1, (0, 3), 3.0, 4.25)
    spans = [encode, *steps("a", [1, 1], start_s=2.0), late_rank, *steps("b", [1], start_s=1.5)]
    assert time_by_part(spans, "a") == {"encode": 0.5, "denoise": 2.25, "between tasks": 0.5}
    assert time_by_part(spans, "c") == {}


def test_requests_are_matched_in_the_order_they_end() -> None:
    spans = [*steps("warm", [1, 1], 0.0), *steps("x1", [1, 2, 4], 10.0), *steps("x2", [1, 1, 1], 9.0)]
    assert match_requests(spans, ["a", "b"], 3) == {"x2": "a", "x1": "b"}
