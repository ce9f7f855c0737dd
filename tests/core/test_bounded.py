"""Dictionaries of bounded size: what they keep, what they forget, and that few entries are all kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gfdit.core.bounded import AnswerCache, RecentDict

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)))  # write or read a key


@given(steps=STEPS, half=st.integers(1, 6))
def test_what_was_used_last_stays_and_the_number_is_bounded(steps: list[tuple[bool, int]], half: int) -> None:
    bounded: RecentDict[int, int] = RecentDict(2 * half)
    values: dict[int, int] = {}
    used: list[int] = []  # keys that it had when they were used, the latest last
    for number, (write, key) in enumerate(steps):
        if write:
            bounded[key] = values[key] = number
        elif (found := bounded.get(key)) is not None:
            assert found == values[key]
        else:
            assert key not in list(dict.fromkeys(reversed(used)))[:half], "used lately, and forgotten"
            continue
        used.append(key)
        assert len(bounded) == len(dict(bounded.items())) <= 2 * half
        assert dict(bounded.items()).items() <= values.items()


def test_what_is_only_read_stays_too() -> None:
    bounded: RecentDict[int, str] = RecentDict(4)
    bounded[0] = "in use"
    for number in range(1, 20):
        bounded[number] = "new"
        assert bounded.get(0) == "in use"


@given(STEPS)
def test_up_to_half_its_size_it_is_a_dictionary(steps: list[tuple[bool, int]]) -> None:
    bounded: RecentDict[int, int] = RecentDict(2 * 13)
    values: dict[int, int] = {}
    for number, (write, key) in enumerate(steps):
        if write:
            bounded[key] = values[key] = number
        assert bounded.get(key) == values.get(key)
    assert dict(bounded.items()) == values


@given(STEPS)
def test_a_cache_gives_what_was_put_in_or_nothing(steps: list[tuple[bool, int]]) -> None:
    cache: AnswerCache[int, int] = AnswerCache(5)
    values: dict[int, int] = {}
    for number, (write, key) in enumerate(steps):
        if write:
            cache[key] = values[key] = number
            assert cache[key] == number
        assert cache.get(key, values.get(key)) == values.get(key)
        assert len(cache) <= 5
