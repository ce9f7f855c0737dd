"""A policy that breaks a rule, raises or decides nothing costs no request: first come is first served instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gfdit.core import (
    Admission,
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    Policy,
    RequestView,
    SchedulerView,
    TaskKind,
    TaskView,
    UnknownCostError,
)
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import CostKey, NominalCostModel
from gfdit.core.policy.fallback import REPEAT_S
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from tests.support.cluster import Cluster
from tests.support.workload import Arrival, make_request, random_requests

Wrong = Callable[[TaskView, SchedulerView], Any]


class NotNowError(Exception):
    """The view does not allow this mistake."""


def first(values: Iterable[Any]) -> Any:
    for value in values:
        return value
    raise NotNowError


def on(*ranks: int, sp: int = 1, cfg: int = 1) -> ExecutionLayout:
    return ExecutionLayout(ranks, ParallelSpec(sp, cfg))


def on_free(view: SchedulerView, count: int, sp: int = 1, cfg: int = 1) -> ExecutionLayout:
    if len(view.free_ranks) < count:
        raise NotNowError
    return on(*view.free_ranks[:count], sp=sp, cfg=cfg)


def running_rank(view: SchedulerView) -> int:
    return first(rank.id for rank in view.ranks if rank.running_request is not None)


# rule the message names -> the layout, or the whole dispatch, to get wrong
WRONG: dict[str, Wrong] = {
    "sp x cfg must equal the number of ranks, got 2 x 1 on 1": lambda task, view: on_free(view, 1, sp=2),
    "sp x cfg must equal the number of ranks, got 0 x 1 on 0": lambda task, view: on(sp=0),
    "a rank is named twice in (1, 1)": lambda task, view: (
        on(1, 1, sp=2) if 1 in view.free_ranks else on_free(view, 9)
    ),
    "rank 9 does not exist or is lost, ranks: [0, 1, 2, 3]": lambda task, view: on(9),
    "is busy with request ": lambda task, view: on(running_rank(view)),
    "denoise at sp3 is not feasible, allowed: sp1, sp2, sp4": lambda task, view: on_free(view, 3, sp=3),
    "denoise at cfg2xsp1 is not feasible": lambda task, view: on_free(view, 2, cfg=2),
    "model 'm' is not loaded on rank 3": lambda task, view: on(3),
    "a dispatch names a task once": lambda task, view: Dispatch((task.id, task.id), on_free(view, 1)),
    "cannot share a batch with": lambda task, view: Dispatch((task.id, other_kind(task, view)), on_free(view, 1)),
}


def other_kind(task: TaskView, view: SchedulerView) -> str:
    return first(other.id for other in view.ready if other.kind is not task.kind)


@dataclass
class BreaksOneRule:
    """Does the wrong thing with the first denoising step of request ``bad`` for which it can be done."""

    wrong: Wrong
    name: str = "broken"
    inner: Equipartition = field(default_factory=Equipartition)

    def schedule(self, view: SchedulerView) -> Decision:
        for task in view.ready:
            if task.request_id == "bad" and task.kind is TaskKind.DENOISE:
                try:
                    wrong = self.wrong(task, view)
                except NotNowError:
                    return self._without(task.id, view)
                if isinstance(wrong, ExecutionLayout):
                    wrong = Dispatch((task.id,), wrong)
                return Decision((wrong,))
        return self.inner.schedule(view)

    def _without(self, task_id: str, view: SchedulerView) -> Decision:
        dispatches = self.inner.schedule(view).dispatches
        return Decision(tuple(dispatch for dispatch in dispatches if task_id not in dispatch.tasks))


def good_and_bad() -> list[Arrival]:
    return [make_request("a"), make_request("bad"), make_request("b"), make_request("c", num_steps=6)]


def ending(cluster: Cluster, request_id: str) -> cmd.Command:
    return cluster.endings[request_id][0]


@pytest.mark.parametrize("rule", WRONG)
def test_a_broken_rule_is_reported_and_fails_nothing(rule: str) -> None:
    for seed in range(5):
        resident = lambda rank: () if "not loaded" in rule and rank == 3 else ("m",)  # noqa: E731
        cluster = Cluster(BreaksOneRule(WRONG[rule]), 4, seed, resident=resident)
        cluster.run(good_and_bad())
        reports = [text for text in cluster.reports if rule in text]
        assert reports and "policy 'broken' broke a rule for task bad/denoise/0" in reports[0]
        assert all("first come, first served instead" in report for report in reports)
        for request_id in ("a", "bad", "b", "c"):
            assert ending(cluster, request_id) == cmd.CompleteRequest(request_id)


# what the error names -> a decision that is none, whatever the view
NONSENSE: dict[str, Any] = {
    "must return a Decision, got NoneType": None,
    "must return dispatches of type Dispatch, got str": Decision(("a/encode",)),  # type: ignore[arg-type]
    "must return a tuple of task ids in each dispatch, got str": Decision((Dispatch("a/encode", on(0)),)),  # type: ignore[arg-type]
    "must return an ExecutionLayout in each dispatch, got list": Decision((Dispatch(("a/encode",), [0]),)),  # type: ignore[arg-type]
    "must return a finite wake_at_s or None, got 'soon'": Decision(wake_at_s="soon"),  # type: ignore[arg-type]
    "must return a finite wake_at_s or None, got nan": Decision(wake_at_s=float("nan")),
    "must return a wake_at_s later than now": Decision(wake_at_s=0.0),
    "a dispatch names at least one task": Decision((Dispatch((), on(0)),)),
    "nobody/encode is not ready": Decision((Dispatch(("nobody/encode",), on(0)),)),
}


@dataclass
class TalksNonsense:
    """Answers ``nonsense`` every other time."""

    nonsense: Any
    name: str = "nonsense"
    inner: Equipartition = field(default_factory=Equipartition)
    calls: int = 0

    def schedule(self, view: SchedulerView) -> Decision:
        self.calls += 1
        return self.nonsense if self.calls % 2 else self.inner.schedule(view)


@pytest.mark.parametrize("rule", NONSENSE)
def test_nonsense_is_reported_and_never_wedges(rule: str) -> None:
    cluster = Cluster(TalksNonsense(NONSENSE[rule]), 4, seed=3)
    cluster.run(random_requests(random.Random(3), 12))
    assert cluster.reports
    assert all("policy 'nonsense'" in report and rule in report for report in cluster.reports)
    endings = {type(end) for endings in cluster.endings.values() for end in endings}
    assert endings == {cmd.CompleteRequest}


@dataclass
class AlwaysRaises:
    name: str = "hopeless"
    calls: int = 0

    def schedule(self, view: SchedulerView) -> Decision:
        self.calls += 1
        raise KeyError("my_table")


def test_a_policy_that_only_raises_is_said_once_and_fails_nothing() -> None:
    cluster = Cluster(AlwaysRaises(), 2, seed=0)
    cluster.run([make_request(name) for name in "abcdef"])
    assert {type(ending(cluster, name)) for name in "abcdef"} == {cmd.CompleteRequest}
    assert "policy 'hopeless' failed in schedule at test_broken_policies.py:" in cluster.reports[0]
    assert "KeyError('my_table'); first come, first served instead" in cluster.reports[0]
    assert len(cluster.reports) <= 1 + cluster.now_s / REPEAT_S


def test_one_event_asks_a_policy_that_raises_once_however_many_wait() -> None:
    """Of the review: one event called the policy 31 times and failed 30 requests."""
    policy = AlwaysRaises()
    control = Cluster(policy, 2, seed=0).control
    run = None
    for index in range(31):
        for command in control.handle(ev.RequestArrived(*make_request(f"r{index}")), float(index)):
            run = run or (command if isinstance(command, cmd.RunTask) else None)
    assert run is not None and len(control.state.requests) == 31
    policy.calls = 0
    control.handle(ev.TaskFinished(run.dispatch_id, run.layout.ranks[0], 1.0), 100.0)
    assert policy.calls == 1 and len(control.state.requests) == 31


class KnowsOneModel(NominalCostModel):
    def _reference_s(self, key: CostKey) -> float:
        if key.model != "m":
            raise UnknownCostError(f"no cost for model {key.model!r}, known: m")
        return super()._reference_s(key)


@pytest.mark.parametrize("policy", [Equipartition(), Fcfs()])
def test_an_unknown_cost_fails_the_request_it_was_asked_for_alone(policy: Policy) -> None:
    cluster = Cluster(policy, 2, seed=1, cost=KnowsOneModel(), resident=lambda rank: ("m", "other"))
    cluster.run([make_request("a"), make_request("b", model="other"), make_request("c")])
    failure = ending(cluster, "b")
    assert isinstance(failure, cmd.FailRequest)
    assert "no cost for model 'other', known: m" in failure.error
    assert {type(ending(cluster, name)) for name in "ac"} == {cmd.CompleteRequest}


@dataclass
class Admits(Equipartition):
    """Answers in ``admit`` what it is told to, or raises it."""

    answer: Any = None

    def admit(self, request: RequestView, view: SchedulerView) -> Admission:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_admission() -> None:
    def outcome(answer: Any) -> tuple[cmd.Command, list[str]]:
        cluster = Cluster(Admits(answer=answer), 1, seed=0)
        cluster.run([make_request("a")])
        return ending(cluster, "a"), cluster.reports

    assert outcome(Admission.accept()) == (cmd.CompleteRequest("a"), [])
    assert outcome(Admission.reject("full", 2.0)) == (cmd.RejectRequest("a", "full", 2.0), [])
    # A policy that fails here must not turn requests away.
    for wrong, expected in [(RuntimeError("oops"), "oops"), (True, "admit returned bool, not Admission")]:
        end, reports = outcome(wrong)
        assert end == cmd.CompleteRequest("a")
        assert len(reports) == 1 and "raised in admit" in reports[0] and expected in reports[0]


def test_a_policy_that_would_leave_every_rank_idle_for_ever_is_reported_and_helped() -> None:
    class Starves(Equipartition):
        def schedule(self, view: SchedulerView) -> Decision:
            return Decision()

    cluster = Cluster(Starves(), 2, seed=0)
    cluster.run([make_request("a"), make_request("b")])
    assert {type(ending(cluster, name)) for name in "ab"} == {cmd.CompleteRequest}
    said = "policy 'equipartition' left every rank idle with 1 tasks ready; first come, first served instead"
    assert cluster.reports[0] == said
