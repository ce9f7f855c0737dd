"""Questions asked of a timeline, on small ones whose answers are plain to see."""

from dataclasses import replace

from gfdit.observe.analysis import (
    boundaries,
    busiest_moment,
    degree_history,
    find_degree_change,
    rank_busy_ratio,
    time_by_part,
)
from gfdit.observe.timeline import Span


def steps(request: str, degrees: list[int], start_s: float = 0.0, first_rank: int = 0) -> list[Span]:
    """One-second steps; step i on the ``degrees[i]`` ranks from ``first_rank`` on."""
    return [
        Span(rank, f"{request}/denoise/{i}", request, "denoise", i, sp, 1, ranks, start_s + i, start_s + i + 1)
        for i, sp in enumerate(degrees)
        for ranks in [tuple(range(first_rank, first_rank + sp))]
        for rank in ranks
    ]


def test_degree_history_gives_the_runs() -> None:
    spans = steps("a", [1, 1, 2, 4, 4, 1])
    assert degree_history(spans, "a") == [(0, 1), (2, 2), (3, 4), (5, 1)]
    assert degree_history(spans, "b") == []


def test_find_degree_change_wants_the_degrees_one_after_the_other() -> None:
    spans = steps("a", [1, 2, 1, 4]) + steps("b", [4, 1, 2, 2, 4], start_s=10)
    assert find_degree_change(spans, (1, 2, 4)) == "b"
    assert find_degree_change(spans, (2, 1, 4)) == "a"
    assert find_degree_change(spans, (4, 2, 1)) is None


def test_busiest_moment_counts_requests_on_disjoint_ranks() -> None:
    spans = steps("a", [1, 1, 1]) + steps("b", [2], start_s=1.5, first_rank=1) + steps("c", [1], start_s=3.5)
    moment = busiest_moment(spans)
    assert moment.at_s == 1.5
    assert moment.ranks_of == {"a": frozenset({0}), "b": frozenset({1, 2})}


def test_busiest_moment_does_not_count_back_to_back_or_shared_ranks() -> None:
    back_to_back = steps("a", [1]) + steps("b", [1], start_s=1.0, first_rank=1)
    assert len(busiest_moment(back_to_back).ranks_of) == 1
    shared = steps("a", [2]) + steps("b", [2], start_s=0.5, first_rank=1)
    assert len(busiest_moment(shared).ranks_of) == 1
    assert busiest_moment([]).ranks_of == {}


def test_migrations_are_not_tasks() -> None:
    move = Span(1, "b/latents/0", "b", "migrate", -1, 0, 0, (0, 1), 0.0, 4.0)
    assert len(busiest_moment([*steps("a", [1, 1]), move]).ranks_of) == 1
    assert rank_busy_ratio([*steps("a", [1, 1]), move], 2) == 0.5


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


def test_rank_busy_ratio() -> None:
    assert rank_busy_ratio(steps("a", [2, 2]) + steps("b", [1], first_rank=3), 4) == 5 / 8
    assert rank_busy_ratio([], 4) == 0.0


def test_time_by_part() -> None:
    encode = Span(0, "a/encode", "a", "encode", 0, 1, 1, (0,), 1.0, 1.5)
    late_rank = Span(3, "a/denoise/1", "a", "denoise", 1, 2, 1, (0, 3), 3.0, 4.25)
    spans = [encode, *steps("a", [1, 1], start_s=2.0), late_rank, *steps("b", [1], start_s=1.5)]
    assert time_by_part(spans, "a") == {"encode": 0.5, "denoise": 2.25, "between tasks": 0.5}
    assert time_by_part(spans, "c") == {}
