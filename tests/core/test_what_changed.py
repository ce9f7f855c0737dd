"""Who reads only what has changed knows as much as who looks at everybody, and policies decide the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import (
    ControlPlane,
    Decision,
    ExecutionLayout,
    ParallelSpec,
    Policy,
    RankRecord,
    RequestView,
    SchedulerView,
    TaskView,
    UnknownCostError,
)
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.events import RequestArrived
from gfdit.core.policy import changes
from gfdit.core.policy.changes import ChangeLog, Changes, Queue, ReadyQueue
from gfdit.policies._groups import WorkerGroups
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.mask_aware import MaskAware
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage
from tests.support.cluster import Cluster, Faults
from tests.support.thorough import thorough
from tests.support.workload import Arrival, make_request, random_requests

SEEDS = st.integers(0, 2**32 - 1)
FAULTS = Faults(task=0.05, cancel=0.01, rank_lost=0.01, late_report=0.05)


class Reader(RandomLayout):
    """Notes what has changed, ``now_and_then``, and compares that with what there is."""

    def __init__(self, now_and_then: float = 1.0) -> None:
        super().__init__()
        self._now_and_then = now_and_then
        self._random = random.Random(0)
        self._changes = Changes()
        self._known: dict[str, tuple[RequestView, tuple[TaskView, ...]]] = {}
        self.num_told = self.num_looks_at_all = self.num_wrong = 0

    def schedule(self, view: SchedulerView) -> Decision:
        ready = view.ready_by_request
        assert ready == replace(view, offers=None).ready_by_request
        if self._random.random() < self._now_and_then:
            changed = self._changes.of(view)
            self.num_looks_at_all += changed is None
            self.num_told += changed is not None
            if changed is None:
                self._known, changed = {}, view.requests
            for name in changed:
                self._known.pop(name, None)
                if name in view.requests:
                    self._known[name] = view.requests[name], ready.get(name, ())
            there = {name: (request, ready.get(name, ())) for name, request in view.requests.items()}
            self.num_wrong += self._known != there
        return super().schedule(view)


def read(reader: Reader, seed: int, num_ranks: int, num_requests: int, run_ahead: int) -> None:
    cluster = Cluster(reader, num_ranks, seed, faults=FAULTS, run_ahead=run_ahead)
    cluster.run(random_requests(random.Random(seed), num_requests))
    assert not [report for report in cluster.reports if "in schedule" in report], cluster.reports


@settings(max_examples=40)
@given(SEEDS, st.integers(2, 6), st.integers(1, 9), st.integers(0, 1), st.sampled_from([1.0, 0.3]))
def test_every_change_is_told(
    seed: int, num_ranks: int, num_requests: int, run_ahead: int, now_and_then: float
) -> None:
    reader = Reader(now_and_then)
    read(reader, seed, num_ranks, num_requests, run_ahead)
    assert reader.num_wrong == 0 and reader.num_looks_at_all <= 1


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_who_has_missed_some_looks_at_all(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_LOGGED", 20)
    reader = Reader(0.3)
    read(reader, 3, 4, 9, run_ahead)
    assert reader.num_wrong == 0 and reader.num_looks_at_all > 3 and reader.num_told > 3


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_change_that_is_not_noted_is_found(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    note = ChangeLog.note

    def forgetful(self: ChangeLog, name: str) -> None:
        if name != "r3":
            note(self, name)

    monkeypatch.setattr(ChangeLog, "note", forgetful)
    reader = Reader()
    read(reader, 3, 4, 9, run_ahead)
    assert reader.num_wrong


def test_what_is_only_foreseen_must_be_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Changes.of

    def without_ahead(self: Changes, view: SchedulerView) -> Any:
        self._ahead = ()
        return of(self, view)

    monkeypatch.setattr(Changes, "of", without_ahead)
    reader = Reader()
    read(reader, 3, 4, 9, run_ahead=1)
    assert reader.num_wrong


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "fcfs 2": lambda: Fcfs(group_size=2),
    "fcfs by task": lambda: Fcfs(assign="task"),
    "srtf": Srtf,
    "srtf widest": lambda: Srtf(parallelism="widest"),
    "edf": Edf,
    "equipartition": Equipartition,
    "rssp": Rssp,
    "mask_aware": MaskAware,
    "mask_aware static": lambda: MaskAware(batching="static"),
    "tetriserve": TetriServe,
    "tetriserve changed": lambda: TetriServe(widest_first=True, starts_in_round=True, fixed_rounds=False),
    "triage": Triage,
}


class Both:
    """Asks a policy that is told of changes, and one of the same kind that looks at everybody each time."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._told, self._looks = make(), make()
        self.name, self.run_ahead = self._told.name, getattr(self._told, "run_ahead", False)
        self.num_asked = 0

    def schedule(self, view: SchedulerView) -> Decision:
        decision, other = self._told.schedule(view), self._looks.schedule(replace(view, offers=None))
        assert set(decision.dispatches) == set(other.dispatches), "the two decide otherwise"
        assert decision.wake_at_s == other.wake_at_s
        self.num_asked += 1
        return decision


def with_deadlines(requests: list[Arrival], draw: random.Random) -> list[Arrival]:
    made = []
    for request, graph in requests:
        deadline_s = draw.choice([None, request.arrival_s + draw.uniform(0.0, 40.0)])
        made.append((replace(request, deadline_s=deadline_s, priority=draw.choice([0, 0, 1])), graph))
    return made


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("seed", [4, *thorough(range(5, 12))])
def test_every_policy_decides_the_same(name: str, run_ahead: int, seed: int) -> None:
    draw, both = random.Random(seed), Both(POLICIES[name])
    cluster = Cluster(both, draw.randint(2, 5), seed, faults=FAULTS, run_ahead=run_ahead)
    cluster.run(with_deadlines(random_requests(draw, 12), draw))
    assert both.num_asked > 20
    assert not [report for report in cluster.reports if "in schedule" in report], cluster.reports


class Moody(NominalCostModel):
    """Knows nothing for a moment, now and then, whatever it is asked."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.num_unknown = 0

    @property
    def version(self) -> int:
        return self.num_unknown  # so that it is asked again

    def candidates(self, task: TaskView) -> tuple[ParallelSpec, ...]:
        self._slip()
        return super().candidates(task)

    def task_s(self, task: TaskView, layout: ExecutionLayout, batch: int = 1) -> float:
        self._slip()
        return super().task_s(task, layout, batch)

    def _slip(self) -> None:
        if self._random.random() < 0.03:
            self.num_unknown += 1
            raise UnknownCostError("it has slipped its mind")


class Watched:
    """Counts how often a policy lets ranks idle that are all free, beside ready tasks, and what it raises."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.num_idle, self.errors = 0, list[Exception]()

    def schedule(self, view: SchedulerView) -> Decision:
        try:
            decision = self._policy.schedule(view)
        except Exception as error:
            self.errors.append(error)
            raise
        self.num_idle += not decision.dispatches and len(view.free_ranks) == len(view.ranks)
        return decision


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_was_interrupted_goes_on(name: str) -> None:
    policy, draw = Watched(POLICIES[name]()), random.Random(2)
    cluster = Cluster(policy, 4, 2, cost=Moody(1), faults=Faults(cancel=0.01, rank_lost=0.01))
    cluster.run(with_deadlines(random_requests(draw, 30), draw))
    assert len(policy.errors) > 3 and {type(error) for error in policy.errors} == {UnknownCostError}
    assert policy.num_idle == 0


def test_who_left_before_it_had_a_place_is_forgotten() -> None:
    groups, seen = WorkerGroups(1), list[SchedulerView]()

    class Groups(RandomLayout):
        def schedule(self, view: SchedulerView) -> Decision:
            seen.append(view)
            groups.update(view)
            return Decision()

    cost = Moody(1)
    plane = ControlPlane(Groups(), [RankRecord(0, frozenset({"m"}))], cost)
    cost._slip = lambda: (_ for _ in ()).throw(UnknownCostError("never known"))  # type: ignore[method-assign]
    plane.handle(RequestArrived(*make_request("a")), 0.0)
    assert groups._arrivals.keys() == {"a"} and not groups._homes
    groups.update(replace(seen[0], ready=(), requests={}, offers=None))
    assert not groups._arrivals


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3) | st.none()), max_size=30))
def test_a_queue_is_in_order(moves: list[tuple[str, int | None]]) -> None:
    queue, keys, numbers = Queue(), dict[str, int](), dict[str, int]()
    for number, (name, key) in enumerate(moves):
        if key is None:
            assert queue.drop(name) == (name in keys)
            keys.pop(name, None)
            numbers.pop(name, None)
        else:
            queue.put(name, key)
            keys[name] = key
            numbers.setdefault(name, number)
        assert list(queue) == sorted(keys, key=lambda name: (keys[name], numbers[name]))
        assert len(queue) == len(keys) and all(name in queue for name in keys)


class ByName:
    """A policy that an author may write with a queue alone: it knows nothing but the order."""

    name = "by name"

    def __init__(self) -> None:
        self._queue = ReadyQueue(lambda request: request.id)
        self.num_asked = 0

    def schedule(self, view: SchedulerView) -> Decision:
        assert [task.id for task in self._queue.of(view)] == [
            task.id for task in sorted(view.ready, key=lambda task: task.request_id)
        ]
        self.num_asked += 1
        return RandomLayout().schedule(view)


def test_ready_tasks_come_in_the_order_of_a_key() -> None:
    policy = ByName()
    cluster = Cluster(policy, 3, 1, faults=FAULTS)
    cluster.run(random_requests(random.Random(1), 15))
    assert policy.num_asked > 30 and not [report for report in cluster.reports if "in schedule" in report]
