"""What a policy sees is what there is, however little of it is rebuilt; and it is asked when that has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from gfdit.core import ControlPlane, Decision, Dispatch, ExecutionLayout, ParallelSpec, RankRecord, SchedulerView
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView, FieldView
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.policy import RankView
from tests.support.workload import make_request

SP2 = ParallelSpec(2)


@dataclass
class Wide:
    """Every step on two ranks, as long as there are two; counts how often it is asked."""

    name: str = "wide"
    asked: int = 0
    seen: list[SchedulerView] = field(default_factory=list)

    def schedule(self, view: SchedulerView) -> Decision:
        self.asked += 1
        self.seen.append(view)
        free, dispatches = list(view.free_ranks), []
        for task in view.ready:
            size = 2 if SP2 in task.candidates else 1
            if len(free) >= size:
                layout = ExecutionLayout(tuple(free[:size]), ParallelSpec(size))
                dispatches.append(Dispatch((task.id,), layout))
                del free[:size]
        return Decision(tuple(dispatches))


def plane(num_ranks: int = 4) -> ControlPlane:
    ranks = [RankRecord(rank, frozenset({"m"})) for rank in range(num_ranks)]
    return ControlPlane(Wide(), ranks, NominalCostModel())


def asked(control: ControlPlane) -> int:
    assert isinstance(control.policy, Wide)
    return control.policy.asked


def running(control: ControlPlane) -> cmd.RunTask:
    """The first dispatch in flight, as a command."""
    record = next(iter(control.state.dispatches.values()))
    return cmd.RunTask(record.id, record.tasks, record.layout)


def finish(control: ControlPlane, now_s: float) -> None:
    command = running(control)
    for rank in command.layout.ranks:
        control.handle(ev.TaskFinished(command.dispatch_id, rank, 0.5), now_s)
        control.check_integrity()


def test_the_policy_is_asked_once_a_dispatch_not_once_a_rank() -> None:
    control = plane()
    control.handle(ev.RequestArrived(*make_request("a", num_steps=2)), 0.0)
    finish(control, 1.0)  # encode
    finish(control, 2.0)  # prepare
    before = asked(control)
    command = running(control)
    assert command.layout.ranks == (0, 1)
    for event in (
        ev.TaskDispatched(command.dispatch_id, 0),
        ev.TaskStarted(command.dispatch_id, 0),
        ev.TaskFinished(command.dispatch_id, 0, 0.5),
        ev.TaskFinished(command.dispatch_id, 0, 0.5),  # again
        ev.TaskFinished(command.dispatch_id - 1, 1, 0.5),  # late
        ev.MigrationFinished(0, 0),
        ev.RequestCancelled("nobody"),
        ev.RankLost(9, "unknown"),
        ev.RankJoined(0),
    ):
        assert control.handle(event, 3.0) == [] and asked(control) == before
    control.handle(ev.TaskFinished(command.dispatch_id, 1, 0.5), 3.0)
    assert asked(control) == before + 1


def test_the_policy_is_asked_when_it_wakes_and_when_ranks_come_and_go() -> None:
    control = plane(num_ranks=1)

    def asks(event: ev.Event) -> int:
        before = asked(control)
        control.handle(event, 3.0)
        control.check_integrity()
        return asked(control) - before

    control.handle(ev.RequestArrived(*make_request("a")), 0.0)
    finish(control, 1.0)
    assert asks(ev.WakeUp()) == 0  # no rank is free
    finish(control, 2.0)
    assert asks(ev.RankLost(0, "test")) == 0
    assert asks(ev.RequestArrived(*make_request("b"))) == 0
    assert asks(ev.RankJoined(0)) == 1
    assert running(control).tasks[0].id == "a/encode"  # its artifacts went with the rank


def test_a_view_stays_as_it_was() -> None:
    """A policy may keep tuples of a view; what happens later must not reach into them."""
    control = plane()
    for name in ("a", "b", "c"):
        control.handle(ev.RequestArrived(*make_request(name)), 0.0)
    assert isinstance(control.policy, Wide)
    view = control.policy.seen[-1]
    kept = (view.ready, view.ranks, view.free_ranks, [view.requests[task.request_id] for task in view.ready])
    copies = tuple(list(part) for part in kept)
    finish(control, 1.0)
    finish(control, 2.0)
    assert tuple(list(part) for part in kept) == copies


def test_ready_tasks_are_in_order_of_arrival_whatever_happens() -> None:
    control = plane(num_ranks=2)
    draw = random.Random(5)
    for index in range(12):
        control.handle(ev.RequestArrived(*make_request(f"r{index}", num_steps=3)), float(index))
    for turn in range(60):
        if control.state.dispatches:
            finish(control, 20.0 + turn)
        if turn % 7 == 3 and control.state.requests:
            control.handle(ev.RequestCancelled(draw.choice(list(control.state.requests))), 20.0 + turn)
            control.check_integrity()
    assert isinstance(control.policy, Wide)
    for view in control.policy.seen:
        order = list(view.requests)
        places = [order.index(task.request_id) for task in view.ready if task.request_id in order]
        assert places == sorted(places)


# The checks themselves: each must notice what it is there for.


def free_a_busy_rank(control: ControlPlane) -> None:
    control.state.ranks._free.append(0)


def keep_an_old_rank(control: ControlPlane) -> None:
    control.state.ranks.views[0] = RankView(0, 99.0, "ghost", frozenset({"m"}), 0)


def keep_an_old_request(control: ControlPlane) -> None:
    views = control.state._request_views
    name = next(iter(views))
    views[name] = replace(views[name], steps_done=views[name].steps_done + 1)


def keep_old_tasks(control: ControlPlane) -> None:
    control.state.ready._in_order = ()


def keep_old_ranks(control: ControlPlane) -> None:
    control.state.ranks._in_order = ()


def keep_old_free_ranks(control: ControlPlane) -> None:
    control.state.ranks._free_in_order = (0, 1, 2)


def lose_a_ready_task(control: ControlPlane) -> None:
    control.state.ready._views.pop()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (free_a_busy_rank, "free ranks"),
        (keep_an_old_rank, "view of a rank"),
        (keep_an_old_request, "view of a request"),
        (keep_old_tasks, "old tasks"),
        (keep_old_ranks, "old ranks"),
        (keep_old_free_ranks, "old free ranks"),
        (lose_a_ready_task, "disagree"),
    ],
)
def test_stale_bookkeeping_is_noticed(spoil: Callable[[ControlPlane], None], told: str) -> None:
    control = plane(num_ranks=3)
    for name in ("a", "b", "c", "d"):
        control.handle(ev.RequestArrived(*make_request(name)), 0.0)
    finish(control, 1.0)
    finish(control, 1.5)
    control.check_integrity()
    spoil(control)
    with pytest.raises(AssertionError, match=told):
        control.check_integrity()


@dataclass
class SeesMemory(Wide):
    sees_memory = True
    run_ahead = True


@pytest.mark.parametrize(("policy", "held_bytes"), [(SeesMemory(), [100, 0]), (Wide(), [0, 0])])
def test_a_policy_that_asks_for_it_sees_what_ranks_hold(policy: Wide, held_bytes: list[int]) -> None:
    ranks = [RankRecord(rank, frozenset({"m"})) for rank in range(2)]
    control = ControlPlane(policy, ranks, NominalCostModel(), run_ahead=1)
    control.handle(ev.RequestArrived(*make_request("a", num_steps=2)), 0.0)
    assert [rank.artifact_bytes for rank in policy.seen[-1].ranks] == [0, 0]
    command = running(control)
    view = ArtifactView((FieldView("x", "uint8", 1, (100,)),))
    (made,) = command.tasks[0].outputs
    control.handle(ev.TaskFinished(command.dispatch_id, command.layout.ranks[0], 0.5, ((made, view),)), 1.0)
    assert [rank.artifact_bytes for rank in policy.seen[-1].ranks] == held_bytes
    control.handle(ev.LookAhead(), 1.5)
    assert [rank.artifact_bytes for rank in policy.seen[-1].ranks] == held_bytes, "and when asked ahead"
