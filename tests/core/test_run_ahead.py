"""Running ahead: the next step queued behind the running one, and taken back until it begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from gfdit.core import (
    ControlPlane,
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    RankRecord,
    SchedulerView,
)
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.outlook import NextStep
from gfdit.core.control.records import DispatchRecord, DispatchState
from gfdit.core.cost.table import NominalCostModel
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from tests.core.test_control_plane import FAULTS, POLICIES
from tests.support.cluster import WITHDRAWN, Cluster
from tests.support.workload import make_request, random_requests

PAIR = ExecutionLayout((0, 1), ParallelSpec(2))


@dataclass
class Urgent:
    """Oldest first on both ranks, except that "urgent" goes before all others."""

    run_ahead: bool = True
    name: str = "urgent"
    seen: list[SchedulerView] = field(default_factory=list)

    def schedule(self, view: SchedulerView) -> Decision:
        self.seen.append(replace(view, requests=dict(view.requests)))
        order = sorted(view.ready, key=lambda task: task.request_id != "urgent")
        if not order or len(view.free_ranks) < 2:
            return Decision()
        layout = PAIR if ParallelSpec(2) in order[0].candidates else ExecutionLayout((0,))
        return Decision((Dispatch((order[0].id,), layout),))


class Driver:
    """Hands events to a control plane, looks ahead whenever it wants to, and checks it after each."""

    def __init__(self, policy: Urgent | None = None, *, run_ahead: int = 1, num_ranks: int = 2) -> None:
        self.policy = policy or Urgent()
        ranks = [RankRecord(rank, frozenset({"m"})) for rank in range(num_ranks)]
        self.plane = ControlPlane(self.policy, ranks, NominalCostModel(), run_ahead=run_ahead)
        self.now_s = 0.0
        self.out: list[cmd.Command] = []

    def tell(self, event: ev.Event, *, look_ahead: bool = True) -> list[cmd.Command]:
        self.now_s += 1.0
        commands = self.plane.handle(event, self.now_s)
        self.plane.check_integrity()
        while look_ahead and self.plane.wants_to_look_ahead:
            commands += self.plane.handle(ev.LookAhead(), self.now_s)
            self.plane.check_integrity()
        for copy in [command for command in commands if isinstance(command, cmd.Migrate)]:
            for rank in copy.ranks:
                self.plane.handle(ev.MigrationFinished(copy.migration_id, rank), self.now_s)
        self.out += commands
        return commands

    def arrive(self, name: str, num_steps: int = 4) -> list[cmd.Command]:
        return self.tell(ev.RequestArrived(*make_request(name, num_steps=num_steps)))

    @property
    def running(self) -> DispatchRecord:
        (record,) = [record for record in self.plane.state.dispatches.values() if record.behind is None]
        return record

    @property
    def queued(self) -> DispatchRecord | None:
        return next((r for r in self.plane.state.dispatches.values() if r.behind is not None), None)

    def finish(self, record: DispatchRecord | None = None) -> list[cmd.Command]:
        record = record or self.running
        return [c for rank in record.layout.ranks for c in self.tell(ev.TaskFinished(record.id, rank, 0.5))]

    def until_step(self, step: str) -> None:
        while self.running.tasks[0].id != step:
            self.finish()


def runs(commands: list[cmd.Command]) -> list[str]:
    return [command.tasks[0].id for command in commands if isinstance(command, cmd.RunTask)]


def withdrawn(commands: list[cmd.Command]) -> list[int]:
    return [command.dispatch_id for command in commands if isinstance(command, cmd.WithdrawTask)]


@pytest.fixture
def driver() -> Driver:
    """Request "a" runs its first step on both ranks, and its second is queued behind it."""
    driver = Driver()
    driver.arrive("a")
    driver.until_step("a/denoise/0")
    return driver


def follower(driver: Driver) -> DispatchRecord:
    assert driver.queued is not None
    return driver.queued


def test_the_next_step_is_queued_on_the_same_layout(driver: Driver) -> None:
    command = driver.out[-1]
    assert isinstance(command, cmd.RunTask)
    assert (command.tasks[0].id, command.layout, command.after) == ("a/denoise/1", PAIR, driver.running.id)
    assert (command.migrations, command.consumes) == ((), ("a/latents/1",))


def test_a_boundary_needs_no_decision(driver: Driver) -> None:
    asked = len(driver.policy.seen)
    queued = follower(driver)
    commands = [
        command
        for rank in (0, 1)
        for command in driver.tell(ev.TaskFinished(driver.running.id, rank, 0.5), look_ahead=False)
    ]
    assert driver.running is queued and len(driver.policy.seen) == asked
    assert not runs(commands)
    assert driver.plane.state.ranks.views[0].running_request == "a"


def test_what_the_policy_is_shown(driver: Driver) -> None:
    view = driver.policy.seen[-1]
    assert view.free_ranks == (0, 1) and [rank.running_request for rank in view.ranks] == [None, None]
    assert view.now_s == driver.running.ends_s > driver.now_s
    (task,) = view.ready
    assert (task.id, task.artifacts) == ("a/denoise/1", (("a/conditioning", (0, 1)), ("a/latents/1", (0, 1))))
    request = view.requests["a"]
    assert (request.steps_done, request.running, request.last_layout) == (1, False, PAIR)


def test_the_view_after_is_the_view_then() -> None:
    """What is shown in advance differs from what is shown at the boundary in the time alone."""
    ahead, strict = Driver(), Driver(run_ahead=0)
    for one in (ahead, strict):
        one.arrive("a")
        one.arrive("b")
    for _ in range(5):
        strict.finish()
        # The strict one has just been asked; the other was before.
        then = strict.policy.seen[-1]
        before = next(view for view in reversed(ahead.policy.seen) if view.ready == then.ready)
        assert before.requests == then.requests and before.free_ranks == then.free_ranks
        assert before.ranks == then.ranks
        ahead.finish()


def test_a_policy_that_does_not_say_so_is_never_asked_ahead() -> None:
    driver = Driver(Urgent(run_ahead=False))
    driver.arrive("a")
    driver.until_step("a/denoise/1")
    assert not driver.plane.wants_to_look_ahead and driver.queued is None


def test_strict_mode_queues_nothing() -> None:
    driver = Driver(run_ahead=0)
    driver.arrive("a")
    driver.until_step("a/denoise/1")
    assert not any(isinstance(command, cmd.RunTask) and command.after for command in driver.out)


def test_run_ahead_is_0_or_1() -> None:
    with pytest.raises(ValueError, match="run_ahead must be 0 or 1, got 2"):
        Driver(run_ahead=2)


def test_a_policy_may_change_its_mind_until_the_step_begins(driver: Driver) -> None:
    queued = follower(driver)
    assert withdrawn(driver.arrive("urgent")) == [queued.id]
    driver.tell(ev.TaskWithdrawn(queued.id))
    assert driver.queued is None and not driver.plane.wants_to_look_ahead
    assert "urgent/encode" in runs(driver.finish())


@pytest.mark.parametrize("told", [ev.TaskDispatched, ev.TaskStarted])
def test_a_step_that_has_begun_is_not_taken_back(
    driver: Driver, told: type[ev.TaskDispatched] | type[ev.TaskStarted]
) -> None:
    """On a device that works by itself it is dispatched first, on the host started first."""
    queued = follower(driver)
    driver.tell(told(queued.id, 0))
    assert withdrawn(driver.arrive("urgent")) == []
    driver.finish()
    assert driver.running is queued


def test_asked_back_too_late_it_runs(driver: Driver) -> None:
    queued = follower(driver)
    driver.arrive("urgent")
    driver.finish()  # and no TaskWithdrawn comes
    assert driver.running is queued and not driver.plane.wants_to_look_ahead
    assert "urgent/encode" in runs(driver.finish())


def test_the_answer_may_come_after_the_step_before_has_ended(driver: Driver) -> None:
    queued = follower(driver)
    driver.arrive("urgent")
    driver.finish()
    commands = driver.tell(ev.TaskWithdrawn(queued.id))
    assert runs(commands)[0] == "urgent/encode"
    assert [task.id for task in driver.plane.state.ready.in_order] == ["a/denoise/1"]


def test_a_repeated_answer_changes_nothing(driver: Driver) -> None:
    queued = follower(driver)
    assert driver.tell(ev.TaskWithdrawn(queued.id)) == [] and driver.queued is queued  # nobody asked for it
    driver.arrive("urgent")
    driver.tell(ev.TaskWithdrawn(queued.id))
    driver.tell(ev.TaskWithdrawn(queued.id))
    driver.tell(ev.TaskFinished(queued.id, 0, 0.5))  # impossible, and of no consequence
    assert driver.queued is None


def test_cancelling_takes_the_queued_step_back(driver: Driver) -> None:
    queued = follower(driver)
    assert withdrawn(driver.tell(ev.RequestCancelled("a"))) == [queued.id]
    driver.tell(ev.TaskWithdrawn(queued.id))
    assert any(isinstance(command, cmd.CancelRequest) for command in driver.finish())
    assert driver.plane.idle


def test_a_request_cancelled_too_late_ends_with_the_queued_step(driver: Driver) -> None:
    driver.tell(ev.RequestCancelled("a"))
    assert not any(isinstance(command, cmd.CancelRequest) for command in driver.finish())
    assert any(isinstance(command, cmd.CancelRequest) for command in driver.finish())
    assert driver.plane.idle


def test_a_failed_step_takes_the_queued_one_along(driver: Driver) -> None:
    running, queued = driver.running, follower(driver)
    assert withdrawn(driver.tell(ev.TaskFailed(running.id, 0, "no memory"))) == [queued.id]
    driver.tell(ev.TaskWithdrawn(queued.id))
    commands = driver.tell(ev.TaskFailed(running.id, 1, "echo", caused_by_peer=True))
    assert [command.rank for command in commands if isinstance(command, cmd.ProbeRank)] == [0]
    assert any(isinstance(command, cmd.ResetEdges) for command in commands)
    assert driver.plane.state.ready.by_id.keys() == {"a/denoise/0"}, "it is to run again, elsewhere"


def test_edges_are_reset_only_when_a_queued_step_that_had_begun_is_over(driver: Driver) -> None:
    """Rank 1 got through the step that failed on rank 0, and waits for it in the next one."""
    running, queued = driver.running, follower(driver)
    driver.tell(ev.TaskFinished(running.id, 1, 0.5))
    driver.tell(ev.TaskStarted(queued.id, 1))
    commands = driver.tell(ev.TaskFailed(running.id, 0, "no memory"))
    assert not any(isinstance(command, cmd.ResetEdges) for command in commands)
    assert [command.rank for command in commands if isinstance(command, cmd.ProbeRank)] == [0]
    driver.tell(ev.TaskFailed(queued.id, 0, "echo", caused_by_peer=True))
    commands = driver.tell(ev.TaskFailed(queued.id, 1, "aborted", caused_by_peer=True))
    assert any(isinstance(command, cmd.ResetEdges) for command in commands)


@pytest.mark.parametrize("answered", [True, False])
def test_a_lost_rank_takes_the_queued_step_along(driver: Driver, answered: bool) -> None:
    running, queued = driver.running, follower(driver)
    assert withdrawn(driver.tell(ev.RankLost(1, "gone"))) == [queued.id]
    if answered:
        driver.tell(ev.TaskWithdrawn(queued.id))
    driver.tell(ev.TaskFailed(running.id, 0, "aborted", caused_by_peer=True))
    if not answered:
        driver.tell(ev.TaskFailed(queued.id, 0, "aborted", caused_by_peer=True))
    # It goes on from the step that was lost, and one loss counts once. The policy would wait for the pair: it is
    # helped out.
    assert [task.id for task in driver.running.tasks] == ["a/denoise/0"] and driver.running.layout.ranks == (0,)
    assert driver.plane.state.requests["a"].num_retries == 1


def test_reports_may_overtake_each_other(driver: Driver) -> None:
    running, queued = driver.running, follower(driver)
    for event in (
        ev.TaskFinished(queued.id, 1, 0.5),
        ev.TaskFinished(queued.id, 0, 0.5),
        ev.TaskFinished(running.id, 1, 0.5),
    ):
        driver.tell(event, look_ahead=False)
        assert driver.running is running
    commands = driver.tell(ev.TaskFinished(running.id, 0, 0.5), look_ahead=False)
    assert runs(commands) == ["a/denoise/2"]


def test_a_fault_of_the_policy_while_it_looks_ahead_harms_nobody() -> None:
    @dataclass
    class Shy(Urgent):
        def schedule(self, view: SchedulerView) -> Decision:
            if view.now_s != int(view.now_s):  # no clock of this test shows such times
                raise RuntimeError("not yet")
            return super().schedule(view)

    driver = Driver(Shy())
    driver.now_s = 0.0
    driver.arrive("a")
    reports = [command.message for command in driver.out if isinstance(command, cmd.ReportFault)]
    assert reports and "not yet" in reports[0] and driver.queued is None
    while not driver.plane.idle:
        driver.finish()
    assert any(isinstance(command, cmd.CompleteRequest) for command in driver.out)


# Mutants: each must be seen by the model of a cluster, or a run that passes says nothing.


class SplitClaims(Cluster):
    """Each rank decides for itself: withdrawn where the word comes before it begins."""

    def _claim(self, rank: int | None, command: cmd.RunTask | cmd.WithdrawTask, wish: str) -> str:
        if rank is not None:
            return self._own_claims.setdefault((command.dispatch_id, rank), wish)
        for member in self.workers:
            self._own_claims.setdefault((command.dispatch_id, member), WITHDRAWN)
        return WITHDRAWN

    @property
    def _own_claims(self) -> dict[tuple[int, int], str]:
        return self.__dict__.setdefault("own_claims", {})


Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Plant] = {}


def mutant(plant: Plant) -> Plant:
    MUTANTS[plant.__name__.replace("_", "-")] = plant
    return plant


@mutant
def keeps_follower_of_failed(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._withdraw_follower

    def withdraw(self: ControlPlane, dispatch: DispatchRecord) -> None:
        if dispatch.error is None:
            original(self, dispatch)

    patch.setattr(ControlPlane, "_withdraw_follower", withdraw)


@mutant
def forgets_doom(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_doom", lambda self, follower, failed: None)


@mutant
def believes_at_once(patch: pytest.MonkeyPatch) -> None:
    """Takes a withdrawal for granted."""
    original = ControlPlane._withdraw_follower

    def withdraw(self: ControlPlane, dispatch: DispatchRecord) -> None:
        original(self, dispatch)
        if follower := self.state.follower(dispatch):
            self.state.unqueue(follower)

    patch.setattr(ControlPlane, "_withdraw_follower", withdraw)


@mutant
def ignores_late_answers(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_withdrawn

    def withdrawn(self: ControlPlane, event: ev.TaskWithdrawn) -> bool:
        dispatch = self.state.dispatches.get(event.dispatch_id)
        return dispatch is not None and dispatch.behind is not None and original(self, event)

    patch.setattr(ControlPlane, "_on_withdrawn", withdrawn)


@mutant
def resets_too_early(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._doom

    def doom(self: ControlPlane, follower: DispatchRecord, failed: DispatchRecord) -> None:
        original(follower, failed)
        follower.doomed = False

    patch.setattr(ControlPlane, "_doom", doom)


@mutant
def trusts_order(patch: pytest.MonkeyPatch) -> None:
    """Ends a dispatch that every rank has reported, even if the one before it has not ended."""
    original = ControlPlane._close_if_done

    def close(self: ControlPlane, dispatch: DispatchRecord) -> bool:
        if not dispatch.waiting_for and dispatch.behind is not None:
            before = self.state.dispatches[dispatch.behind]
            before.waiting_for.clear()
            self.state.release(dispatch, DispatchState.OVER)
            return True
        return original(self, dispatch)

    patch.setattr(ControlPlane, "_close_if_done", close)


@mutant
def queues_twice(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_look_ahead

    def look_ahead(self: ControlPlane, event: ev.LookAhead) -> bool:
        for dispatch in self.state.dispatches.values():
            if dispatch.behind is None and dispatch.followed_by is not None:
                dispatch.followed_by, dispatch.asked_version = None, -1
        return original(self, event)

    patch.setattr(ControlPlane, "_on_look_ahead", look_ahead)


@mutant
def queues_elsewhere(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._queue

    def queue(self: ControlPlane, following: NextStep, running: DispatchRecord) -> None:
        original(self, following, running)
        queued = self.state.follower(running)
        assert queued is not None
        queued.layout = ExecutionLayout(queued.layout.ranks[::-1], queued.layout.parallel)

    patch.setattr(ControlPlane, "_queue", queue)


SEEDS = 80


def breaks(cluster_type: type[Cluster]) -> Iterator[str]:
    """What each run that breaks says, over policies that queue and take back."""
    for seed in range(SEEDS):
        for name in ("fcfs-2", "equipartition", "batches"):
            cluster = cluster_type(POLICIES[name](), 4, seed, faults=FAULTS, run_ahead=1)
            try:
                cluster.run(random_requests(random.Random(seed), 6))
            except (AssertionError, KeyError, ValueError) as error:
                yield f"{type(error).__name__}: {error}"


def test_nothing_breaks_where_the_mutants_must() -> None:
    assert next(breaks(Cluster), None) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_control_plane_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert next(breaks(Cluster), None) is not None


def test_ranks_that_decide_for_themselves_split_the_group() -> None:
    assert any("wait for each other" in told for told in breaks(SplitClaims))


@pytest.mark.parametrize("policy", [Fcfs(group_size=2), Equipartition()])
def test_the_runs_above_do_queue_and_take_back(policy: Fcfs | Equipartition) -> None:
    """Otherwise they would say nothing about it."""
    queued = taken_back = 0
    for seed in range(20):
        cluster = Cluster(type(policy)(), 4, seed, faults=FAULTS, run_ahead=1)
        cluster.run(random_requests(random.Random(seed), 6))
        queued += sum(command.after is not None for command in cluster.ran)
        taken_back += sum(claim == WITHDRAWN for claim in cluster.claims.values())
    assert queued > 100 and taken_back > 5
