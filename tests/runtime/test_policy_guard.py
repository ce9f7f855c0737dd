"""What stands between the control process and its policy passes on what that says of itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from gfdit.core import Admission, Decision, Policy, RequestView, SchedulerView
from gfdit.core.policy.admission import with_admission
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage
from gfdit.runtime.policy_guard import GuardedPolicy, PolicyTimeoutError

SAID = ("run_ahead", "sees_memory", "places_components")


@pytest.fixture(autouse=True)
def alarm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "wrap", [lambda policy: GuardedPolicy(policy, 1.0), lambda p: with_admission(p, "deadline")]
)
@pytest.mark.parametrize("policy", [Lego, Triage])
def test_a_wrapped_policy_says_the_same_of_itself(
    policy: Callable[[], Policy], wrap: Callable[[Any], Any]
) -> None:
    wrapped, own = wrap(policy()), policy()
    assert [getattr(wrapped, name, False) for name in SAID] == [getattr(own, name, False) for name in SAID]
    assert wrapped.places_components


class Torn:
    """The first of its kind never comes to the end of what it takes in."""

    name = "torn"

    def __init__(self, number: int) -> None:
        self.number, self.whole = number, True

    def schedule(self, view: SchedulerView) -> Decision:
        assert self.whole, "it was stopped in the middle"
        self.whole = False
        while self.number == 1:
            pass
        self.whole = True
        return Decision(wake_at_s=float(self.number))

    def admit(self, request: RequestView, view: SchedulerView) -> Admission:
        return Admission.reject(f"by number {self.number}")


def test_another_takes_the_place_of_one_that_was_stopped() -> None:
    numbers = count(1)
    view: Any = None
    guarded = GuardedPolicy(Torn(next(numbers)), 0.05, make=lambda: Torn(next(numbers)))
    assert guarded.admit(view, view).reason == "by number 1"
    with pytest.raises(PolicyTimeoutError):
        guarded.schedule(view)
    assert guarded.schedule(view).wake_at_s == 2.0
    assert guarded.admit(view, view).reason == "by number 2"
    kept = GuardedPolicy(Torn(1), 0.05)
    with pytest.raises(PolicyTimeoutError):
        kept.schedule(view)
    with pytest.raises(AssertionError, match="in the middle"):
        kept.schedule(view)
