"""Which replica a request goes to, by what each says of its work."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gfdit.core.routing import Ask, Replica, ReplicaLoad, Service, ask_for, choose, forecast, weight_percent

SMALL = Service("512x512", 10, {1: 4.0, 2: 3.0})
LARGE = Service("1024x1024", 10, {1: 20.0, 2: 12.0})


def load(
    *due: tuple[float, float], ranks: int = 2, services: tuple[Service, ...] = (), **more: Any
) -> ReplicaLoad:
    return ReplicaLoad(ready=True, live_ranks=2, alive=len(due), due=due, services=services, **more)


NOT_READY = ReplicaLoad(ready=False, live_ranks=2)
WITHOUT_RANKS = ReplicaLoad(ready=True, live_ranks=0)


def test_nothing_is_sent_where_nothing_can_be_served() -> None:
    assert choose([NOT_READY, WITHOUT_RANKS], Ask()) is None
    assert choose([], Ask()) is None
    assert choose([NOT_READY, load((1.0, 1e6)), WITHOUT_RANKS], Ask(2.0, 1.0)) == 1
    assert weight_percent(NOT_READY) == weight_percent(WITHOUT_RANKS) == 0


def test_where_nothing_is_late_the_least_crowded_counts_then_the_work() -> None:
    """Ranks without a request start it at once; of servers that have them, the one with less to do."""
    crowded = ReplicaLoad(True, live_ranks=2, alive=2, due=((math.inf, 2.0),))
    busy = ReplicaLoad(True, live_ranks=2, alive=1, due=((math.inf, 9.0),))
    assert choose([crowded, busy], Ask(20.0, 4.0, 3.0)) == 1
    wide = ReplicaLoad(True, live_ranks=4, alive=4, due=((math.inf, 9.0),))
    assert choose([crowded, wide], Ask(20.0, 4.0, 3.0)) == 1
    assert choose([busy, ReplicaLoad(True, live_ranks=2, alive=1)], Ask(20.0, 4.0, 3.0)) == 1


def test_without_a_deadline_it_goes_where_it_ends_first() -> None:
    ask = Ask(None, rank_s=4.0, alone_s=3.0)
    idle, busy = load(), load((5.0, 6.0), (math.inf, 4.0))
    assert forecast(idle, ask) == (3.0, 0.0)
    assert forecast(busy, ask) == (7.0, 0.0)  # (6 + 4 + 4) rank-seconds on two ranks
    assert choose([busy, idle], ask) == 1


def test_only_what_is_due_earlier_goes_before_a_deadline() -> None:
    ask = Ask(6.0, rank_s=4.0, alone_s=3.0)
    much_later, little_now = load((math.inf, 100.0)), load((5.0, 10.0))
    assert forecast(much_later, ask) == (3.0, 0.0)
    assert forecast(little_now, ask) == (7.0, 2.0)  # a second too late on two ranks
    assert choose([little_now, much_later], ask) == 1
    # Negative control: by its backlog the other would be chosen, as it is by one that is never late.
    assert choose([little_now, much_later], Ask(None, 4.0, 3.0)) == 0


def test_it_does_not_make_others_late() -> None:
    """One that would end first may push out what is due after it."""
    tight, loose = load((10.0, 19.0)), load((4.0, 4.0), (20.0, 4.0))
    ask = Ask(5.0, rank_s=4.0, alone_s=2.0)
    assert forecast(tight, ask).finish_s < forecast(loose, ask).finish_s
    assert forecast(tight, ask).late_rank_s == pytest.approx(3.0)  # 19 + 4 of 20 that two ranks do in 10 s
    assert forecast(loose, ask).late_rank_s == 0
    assert choose([tight, loose], ask) == 1


def test_what_is_overdue_gives_way() -> None:
    """To one with a deadline; without one it waits for all."""
    overdue = load((0.0, 50.0))
    assert forecast(overdue, Ask(5.0, 4.0, 3.0)) == (3.0, 0.0)
    assert forecast(overdue, Ask(None, 4.0, 3.0)).finish_s == 27.0
    assert choose([overdue, load()], Ask(5.0, 4.0, 3.0)) == 1  # all else equal, the least work


def test_what_is_late_anyway_costs_no_more_than_its_own_work() -> None:
    hopeless = load((1.0, 1e6))
    assert forecast(hopeless, Ask(2.0, rank_s=4.0, alone_s=3.0)).late_rank_s == 4.0
    assert forecast(load(), Ask(1.0, rank_s=4.0, alone_s=3.0)).late_rank_s == pytest.approx(4.0)


def test_work_within_a_bound_is_due_evenly() -> None:
    """The replica says how much is due in 20 to 30 s, not when."""
    half = forecast(load((20.0, 10.0), (30.0, 20.0)), Ask(25.0, rank_s=2.0))
    assert half.finish_s == pytest.approx((10 + 20 / 2 + 2) / 2)


def test_live_requests_that_nobody_knows_count_as_others_do() -> None:
    assert forecast(load(num_unknown=3), Ask(None, 4.0, 3.0)).finish_s == (3 * 4 + 4) / 2


def test_weights() -> None:
    """By how much longer a request of the usual kind takes than on an idle replica."""
    services = (SMALL, LARGE)  # 12 rank-seconds on average, 6 s on two ranks
    assert weight_percent(load(services=services)) == 100
    assert weight_percent(load((math.inf, 12.0), services=services)) == 50
    assert weight_percent(load((5.0, 1e9), services=services)) == 1
    assert weight_percent(ReplicaLoad(True, live_ranks=2, alive=2)) == 50  # of which nothing is known yet


@pytest.mark.parametrize(
    ("size", "steps", "rank_s", "alone_s"),
    [
        ("512x512", 10, 4.0, 3.0),
        ("512x512", 20, 8.0, 6.0),  # by the steps
        ("768x768", 10, 12.0, 7.5),  # the mean of what is known
        (None, None, 12.0, 7.5),
    ],
)
def test_what_a_request_takes(size: str | None, steps: int | None, rank_s: float, alone_s: float) -> None:
    loads = [load(services=(SMALL,)), load(services=(LARGE,))]
    assert ask_for(loads, size, steps, 9.0) == Ask(9.0, rank_s, alone_s)
    assert ask_for([load()], size, steps, 9.0) == Ask(9.0)


def test_what_was_sent_counts_until_the_replica_tells_of_it() -> None:
    replica = Replica()
    assert not replica.load.ready
    replica.told(load((10.0, 1.0)), at_s=1.0)
    replica.sent(Ask(10.0, 2.0), now_s=1.5)
    replica.sent(Ask(None, 3.0), now_s=2.5)
    assert replica.load.due == ((10.0, 3.0), (math.inf, 3.0)) and replica.load.alive == 3  # one is another's
    replica.ended()
    assert replica.load.alive == 2
    replica.told(load((10.0, 2.0)), at_s=2.0)
    assert replica.load.due == ((10.0, 2.0), (math.inf, 3.0)) and replica.load.alive == 1


@pytest.mark.parametrize("answer", [{}, {"error": "no engine"}, {"ready": True, "due": [1]}, {"due": None}])
def test_another_answer_is_no_load(answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no load of a replica"):
        ReplicaLoad.of_json(answer)
