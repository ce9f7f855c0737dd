"""Which blocks of a step read what was kept of a template, and which compute all tokens meanwhile (FlashPS §4.2).

Blocks run one after the other, and so do loads, beside them. A block that reads is short, but begins when its load
is there; one that computes all tokens loads nothing. Times in seconds, of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class LoadPlan(NamedTuple):
    """``reads[i]``: whether block ``i`` does. ``seconds``: when the last block ends."""

    reads: tuple[bool, ...]
    seconds: float


def best_plan(cached_s: Sequence[float], full_s: Sequence[float], load_s: Sequence[float]) -> LoadPlan:
    """The shortest of all, for activations that any block can go on from.

    Of two ways to the same block, one that has loaded and computed no longer than the other is as good for all
    that follows: only those that no other one is better than in both are kept.
    """
    frontier: list[tuple[float, float, tuple[bool, ...]]] = [(0.0, 0.0, ())]
    for cached, full, load in zip(cached_s, full_s, load_s, strict=True):
        ways = [(at, computed + full, (*reads, False)) for at, computed, reads in frontier]
        ways += [
            (at + load, max(at + load, computed) + cached, (*reads, True)) for at, computed, reads in frontier
        ]
        frontier = []
        for way in sorted(ways):
            if not frontier or way[1] < frontier[-1][1]:
                frontier.append(way)
    _, seconds, reads = min(frontier, key=lambda way: way[1])
    return LoadPlan(reads, seconds)


def greedy_plan(cached_s: Sequence[float], full_s: Sequence[float], load_s: Sequence[float]) -> LoadPlan:
    """Algorithm 1 of the paper: each block as is shorter up to its end. What it loads delays later ones."""
    loaded = computed = 0.0
    reads = []
    for cached, full, load in zip(cached_s, full_s, load_s, strict=True):
        end_s = max(loaded + load, computed) + cached
        reads.append(end_s <= computed + full)
        loaded, computed = (loaded + load, end_s) if reads[-1] else (loaded, computed + full)
    return LoadPlan(tuple(reads), computed)


def naive_s(cached_s: Sequence[float], load_s: Sequence[float]) -> float:
    """All loads first, then all blocks (Figure 9, top)."""
    return sum(load_s) + sum(cached_s)


def block_by_block_s(cached_s: Sequence[float], load_s: Sequence[float]) -> float:
    """All blocks read, each once its load is there (Figure 9, middle)."""
    loaded = computed = 0.0
    for cached, load in zip(cached_s, load_s, strict=True):
        loaded += load
        computed = max(loaded, computed) + cached
    return computed


@lru_cache(1000)
def leading_full_blocks(
    num_blocks: int, cached_s: float, full_s: float, load_s: float, num_ahead: int, num_steps: int = 4
) -> int:
    """How many first ones of equal blocks should compute all, so that the last of ``num_steps`` is shortest.

    With keys and values that is all there is to choose: after a block that has left tokens out, none can compute
    them. Loads are at most ``num_ahead`` blocks ahead of their use, also from one step to the next.
    """
    return min(
        range(num_blocks + 1),
        key=lambda num_full: steady_step_s(num_full, num_blocks, cached_s, full_s, load_s, num_ahead, num_steps),
    )


def steady_step_s(
    num_full: int,
    num_blocks: int,
    cached_s: float,
    full_s: float,
    load_s: float,
    num_ahead: int,
    num_steps: int = 4,
) -> float:
    """What the last of ``num_steps`` takes if the first ``num_full`` blocks compute all."""
    now_s = before_s = loaded_s = 0.0
    used_s: list[float] = []
    for _ in range(num_steps):
        before_s = now_s
        now_s += num_full * full_s
        for _ in range(num_blocks - num_full):
            room_s = used_s[-num_ahead - 1] if len(used_s) > num_ahead else 0.0
            loaded_s = max(loaded_s, room_s) + load_s
            now_s = max(now_s, loaded_s)
            used_s.append(now_s)
            now_s += cached_s
    return now_s - before_s
