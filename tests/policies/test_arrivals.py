"""Learnt rates of arrivals, and whom they keep room for."""

from __future__ import annotations

import math

import pytest

from gfdit.policies._arrivals import ArrivalRates
from gfdit.policies._prospects import Prospect
from tests.policies.test_dues import kept, prospect


def learnt(*, every_s: float, until_s: float, allowed_s: float = 10.0) -> ArrivalRates:
    """Requests of 2 rank-seconds, one after the other."""
    rates = ArrivalRates(memory=2.0)
    for number in range(round(until_s / every_s)):
        rates.note(number * every_s, 2.0, 2.0, allowed_s)
    return rates


def test_a_steady_rate_is_learnt_and_counts_for_larger_requests_only() -> None:
    smaller = learnt(every_s=0.5, until_s=200.0).smaller(200.0)
    assert smaller.of(5.0) == pytest.approx(4.0, rel=0.05)
    assert smaller.of(2.0) == smaller.of(1.0) == 0.0


def test_a_burst_is_forgotten_as_fast_as_deadlines_pass() -> None:
    rates = learnt(every_s=0.5, until_s=200.0)
    later = rates.smaller(200.0 + 2.0 * 10.0).of(5.0) / rates.smaller(200.0).of(5.0)
    assert later == pytest.approx(math.exp(-1))
    # Who may wait for longer is remembered for longer.
    patient = learnt(every_s=0.5, until_s=200.0, allowed_s=40.0)
    assert patient.smaller(220.0).of(5.0) > 1.5 * rates.smaller(220.0).of(5.0)


def test_without_deadlines_nothing_is_expected() -> None:
    assert learnt(every_s=0.5, until_s=50.0, allowed_s=math.inf).smaller(50.0).of(100.0) == 0.0


def test_room_is_left_for_smaller_requests_to_come() -> None:
    def pair() -> tuple[Prospect, Prospect]:
        return prospect("a", 0.0, 3.0, 10.0), prospect("b", 0.0, 6.0, 10.0)

    assert kept(*pair(), capacity=1.0) == "ab"
    assert kept(*pair(), capacity=1.0, reserved=lambda size: 0.5 if size > 4 else 0.0) == "a"
    # Nothing smaller than those that are there is expected.
    assert kept(*pair(), capacity=1.0, reserved=lambda size: 0.5 if size > 7 else 0.0) == "ab"
