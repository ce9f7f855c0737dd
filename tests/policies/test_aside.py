"""Those who wait and are late, in queues: the same order as if all were looked at."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import Decision, SchedulerView
from gfdit.policies._aside import Aside, shortest_first
from gfdit.policies._prospects import Prospect, Prospects
from gfdit.policies.triage import Triage
from tests.policies.test_dues import prospect
from tests.policies.test_triage import SIZES, alone_s, met, request, run
from tests.support.thorough import thorough

KINDS = st.sampled_from([(4.0, None), (4.0, 1.0), (6.0, None), (6.0, 1.0), (9.0, 1.0)])


def several(kinds: list[tuple[float, float | None]]) -> list[Prospect]:
    made = []
    for number, (seconds, deadline_s) in enumerate(kinds):
        one = (
            prospect(str(number), 0.0, seconds, deadline_s) if deadline_s else prospect(str(number), 0.0, seconds)
        )
        one.number = number
        made.append(one)
    return made


def by_turn(prospects: list[Prospect]) -> list[Prospect]:
    return sorted(prospects, key=lambda one: (one.shortness, one.due_s, one.number))


@given(
    st.lists(KINDS, max_size=12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.floats(3.0, 10.0)
)
def test_queues_and_others_come_as_one(
    kinds: list[tuple[float, float | None]], outside: set[int], unready: set[int], longest_s: float
) -> None:
    everyone, aside = several(kinds), Aside()
    others = [one for one in everyone if one.number in outside]
    for one in everyone:
        if one.number not in outside:
            aside.add(one)
    queues = aside.queues.values()
    ready = [one for one in everyone if one.number in outside or one.number not in unready]
    found = shortest_first(by_turn(others), queues, lambda one: one.number not in unready)
    assert list(found) == by_turn(ready)
    short = shortest_first(
        by_turn(others), queues, lambda one: one.number not in unready, lambda one: one.step_s <= longest_s
    )
    assert list(short) == [one for one in by_turn(ready) if one.step_s <= longest_s]
    for bound in (3.0, 4.0, 5.0, 6.0, 10.0):
        assert aside.num_shorter(bound) == sum(one.shortness < bound for one in everyone if one not in others)
    for one in everyone:
        if one not in others:
            aside.remove(one)
    assert not aside.queues


class WithoutQueues(Triage):
    """Looks at everybody, each time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prospects.put_aside = lambda: None  # type: ignore[method-assign]


class Both:
    """Asks both, and counts those aside."""

    name, run_ahead = "both", True

    def __init__(self, **arguments: float) -> None:
        self.one, self.other = Triage(**arguments), WithoutQueues(**arguments)  # type: ignore[arg-type]
        self.most_aside = 0

    def schedule(self, view: SchedulerView) -> Decision:
        decision = self.one.schedule(view)
        assert decision == self.other.schedule(view)
        num_aside = sum(map(len, self.one._prospects.aside.queues.values()))
        self.most_aside = max(self.most_aside, num_aside)
        assert num_aside + len(self.one._prospects.live) == len(self.one._prospects._known)
        return decision


@pytest.mark.parametrize(
    "arguments", [{}, *thorough([{"patience": 0.3}, {"lending": 1.0, "price": 1.0}])], ids=str
)
@pytest.mark.parametrize("seed", [0, *thorough([1])])
def test_they_change_no_decision(arguments: dict[str, float], seed: int) -> None:
    draw, trace, now_s = random.Random(seed), [], 0.0
    for number in range(80):
        now_s += draw.expovariate(1.5)
        size = draw.choice(SIZES)
        factor = draw.choice((0.4, 1.1, 1.5, 4.0, None))
        due_s = factor and factor * alone_s(request("", 0, size, None))
        trace.append(request(f"r{number}", now_s, size, due_s, draw.choice((0, 0, 1))))
    both = Both(**arguments)
    done = run(both, trace, num_ranks=4)
    assert both.most_aside > 10 and 0 < len(met(done)) < 64


def test_who_is_gone_is_forgotten_also_beside_one_that_nobody_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = {one.request.id: one for one in several([(4.0, None)] * 3)}
    monkeypatch.setattr(Prospects, "_make", lambda self, request, view: everyone.get(request.id))
    requests = {name: one.request for name, one in everyone.items()}

    def known(*names: str) -> set[str]:
        unable = replace(requests["0"], id="unable")
        asked = {name: requests[name] for name in names} | {"unable": unable}
        cost: Any = SimpleNamespace(version=0)
        found = prospects.of(SchedulerView(0.0, (), asked, (), (), cost))
        assert found.keys() == prospects.live.keys()
        return set(found)

    prospects = Prospects()
    assert known("0", "1", "2") == {"0", "1", "2"}
    assert known("0", "2") == {"0", "2"}
