"""What stands between the control process and its policy passes on what that says of itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gfdit.core import Policy
from gfdit.core.policy.admission import with_admission
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage
from gfdit.runtime.policy_guard import GuardedPolicy

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
