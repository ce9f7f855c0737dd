"""The example that the documentation shows, run as it says, and the check that it offers to authors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from gfdit.core import Decision, Dispatch, ExecutionLayout, Policy, SchedulerView
from gfdit.core.layouts import SINGLE
from gfdit.core.policy.loading import load_policy
from gfdit.sim.checking import check_policy
from tests.support.timed_cluster import simulate
from tests.support.workload import make_request

ROOT = Path(__file__).parents[2]
SPEC = f"{ROOT / 'examples' / '02_write_a_policy.py'}:OldestWidest"


def test_it_serves_the_oldest_request_on_as_many_ranks_as_it_may() -> None:
    run = simulate(
        load_policy(SPEC, {}), 4, [make_request("a"), make_request("b", arrival_s=1.0)], work_conserving=True
    )
    assert run.sizes("a") == [4, 4, 4]
    assert run.finish_s["a"] < run.finish_s["b"]
    assert set(simulate(load_policy(SPEC, {"max_ranks": "2"}), 4, [make_request("a")]).sizes("a")) == {2}


def test_it_keeps_the_rules() -> None:
    check_policy(lambda: load_policy(SPEC, {}), seeds=range(3))
    check_policy(lambda: load_policy(SPEC, {}), num_ranks=1, seeds=range(1))


class Base:
    name = "wrong"
    run_ahead = True
    run_no = itertools.count()

    def __init__(self) -> None:
        self.run = next(self.run_no)

    def first(self, view: SchedulerView, rank: int) -> Decision:
        return Decision((Dispatch((view.ready[0].id,), ExecutionLayout((rank,), SINGLE)),))


class TakesBusyRanks(Base):
    def schedule(self, view: SchedulerView) -> Decision:
        return self.first(view, 0)


class Forgets(Base):
    def schedule(self, view: SchedulerView) -> Decision:
        return self.first(view, view.free_ranks[0]) if view.now_s < 1 else Decision()


class ForgetsAComma(Base):
    def schedule(self, view: SchedulerView) -> Decision:
        return Decision(self.first(view, view.free_ranks[0]).dispatches[0])  # type: ignore[arg-type]


class RemembersOtherRuns(Base):
    def schedule(self, view: SchedulerView) -> Decision:
        task = view.ready[-1 if self.run % 2 else 0]
        return Decision((Dispatch((task.id,), ExecutionLayout(view.free_ranks[:1], SINGLE)),))


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (TakesBusyRanks, "seed 0, quiet: policy 'wrong' broke a rule for task .*: rank 0 is "),
        (Forgets, "policy 'wrong' left every rank idle"),
        (ForgetsAComma, r"Decision\(dispatches=...\) with a tuple, for a single one \(it,\), got Dispatch"),
        (RemembersOtherRuns, "seed 0, quiet: policy 'wrong' decides otherwise when it is run again, first for r"),
    ],
)
def test_what_breaks_a_rule_is_told(policy: Callable[[], Policy], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_policy(policy)


def test_the_documentation_shows_it() -> None:
    source = (ROOT / "examples" / "02_write_a_policy.py").read_text()
    shown = (ROOT / "docs" / "policies.md").read_text().split("```python\n")[1].split("```")[0].partition("\n")[2]
    assert shown in source
