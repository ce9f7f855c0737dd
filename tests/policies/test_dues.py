"""Due times: who is kept, what can be lent, and how long first come, first served would let requests wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

import pytest

from gfdit.core import ParallelSpec, RequestView, Shape
from gfdit.core.policy.estimates import ServiceTimes
from gfdit.policies._aside import Aside
from gfdit.policies._dues import ShadowQueue, Slack, give_up_dear, keep
from gfdit.policies._prospects import Prospect


def prospect(
    name: str, arrival_s: float, left_s: float, deadline_s: float = math.inf, weight: float = 1.0
) -> Prospect:
    """On one rank; on two it takes 0.6 times as long."""
    request = RequestView(
        id=name,
        model="m",
        shape=Shape(512, 512),
        cfg=False,
        steps_done=0,
        num_steps=1,
        arrival_s=arrival_s,
        deadline_s=None if deadline_s == math.inf else deadline_s,
        priority=0,
        slo_class="default",
        candidates=(ParallelSpec(1), ParallelSpec(2)),
        tasks_left=MappingProxyType({}),
        last_layout=None,
        running=False,
    )
    times = ServiceTimes({}, {}, {})
    return Prospect(
        request,
        times,
        ((ParallelSpec(1), left_s), (ParallelSpec(2), 0.6 * left_s)),
        request.candidates,
        1,
        0.0,
        (left_s, 0.6 * left_s),
        (left_s, 1.2 * left_s),
        weight,
        deadline_s,
    )


def kept(
    *prospects: Prospect,
    capacity: float,
    max_waste: float = math.inf,
    reserved: Callable[[float], float] = lambda size: 0.0,
) -> str:
    keep(prospects, capacity=capacity, max_waste=max_waste, now_s=0.0, reserved=reserved)
    return "".join(each.request.id for each in prospects if each.kept)


def test_the_one_with_the_most_work_per_weight_is_given_up() -> None:
    def trio(weight: float) -> list[Prospect]:
        return [
            prospect("a", 0.0, 4.0, 10.0),
            prospect("b", 0.0, 5.0, 10.0, weight),
            prospect("c", 0.0, 3.0, 10.0),
        ]

    assert kept(*trio(1.0), capacity=1.2) == "abc"
    assert kept(*trio(1.0), capacity=1.0) == "ac"
    assert kept(*trio(2.0), capacity=1.0) == "bc"


def test_what_is_given_up_is_due_never() -> None:
    one, other = prospect("o", 0.0, 6.0, 10.0), prospect("n", 0.0, 5.0, 10.0)
    assert kept(one, other, capacity=1.0) == "n"
    assert (one.due_s, other.due_s) == (math.inf, 10.0)


@pytest.mark.parametrize(("price_rank_s", "left"), [(46.0, "ab"), (44.0, "a"), (19.0, "")])
def test_a_deadline_has_a_price_for_the_late_who_are_shorter(price_rank_s: float, left: str) -> None:
    """On one rank, ``b`` makes three wait for 15 s and ``a`` two of them for 10 s."""
    for num_aside in range(4):
        late = [prospect("x", 0.0, 4.0), prospect("y", 0.0, 5.0), prospect("z", 0.0, 12.0)]
        both = [prospect("a", 0.0, 10.0, 50.0), prospect("b", 0.0, 15.0, 50.0)]
        assert kept(*both, *late, capacity=1.0) == "ab"
        aside = Aside()
        for number, one in enumerate(late[:num_aside]):
            one.number = number
            aside.add(one)
        give_up_dear([*both, *late[num_aside:]], aside, price_rank_s, num_ranks=1)
        assert "".join(each.request.id for each in both if each.kept) == left


def test_a_wider_degree_is_for_the_missing_time_only_and_has_its_price() -> None:
    late = prospect("a", 0.0, 10.0, 8.0)  # halfway between 10 s on one rank and 6 s on two
    assert kept(late, capacity=4.0) == "a" and late.spec.size == 2
    assert late.work_rank_s == pytest.approx(11.0)
    assert kept(late, capacity=4.0, max_waste=0.1) == ""
    assert kept(prospect("a", 0.0, 10.0, 5.9), capacity=4.0) == ""


def test_slack_is_lent_once_and_before_every_earlier_due_time() -> None:
    first, second = prospect("a", 0.0, 4.0, 10.0), prospect("b", 0.0, 4.0, 20.0)
    assert kept(first, second, capacity=1.0) == "ab"
    slack = Slack([first, second], num_ranks=1, lending=1.0, now_s=0.0)
    assert slack.spend(100.0, 10.0)  # nobody is due before
    slack = Slack([first, second], num_ranks=1, lending=1.0, now_s=0.0)
    assert slack.spend(5.0, 15.0) and not slack.spend(2.0, 15.0) and slack.spend(1.0, math.inf)
    assert not Slack([first, second], num_ranks=1, lending=0.5, now_s=0.0).spend(2.0, 15.0)


def test_the_shadow_queue_is_a_fluid_until_nobody_is_left() -> None:
    queue = ShadowQueue()
    one, two, three = prospect("1", 0.0, 10.0), prospect("2", 0.0, 10.0), prospect("3", 4.0, 6.0)
    queue.follow({"1": one, "2": two}, None, num_ranks=2)
    assert queue.longest_s == 15.0  # ten rank-seconds before it, on two ranks
    queue.follow({"2": two, "3": three}, None, num_ranks=2)
    assert queue.longest_s == 15.0  # (20 - 8) / 2 + 6 is less
    queue.follow({"4": prospect("4", 50.0, 3.0)}, None, num_ranks=2)
    assert queue.longest_s == 3.0
