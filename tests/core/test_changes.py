"""What an operator changes while requests run: policy, costs, limits, ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import ControlPlane, ParallelSpec, Policy, RankRecord, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import NOMINAL, CostEntry, CostTable, NominalCostModel, TableCostModel
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from tests.support.cluster import Cluster, Faults
from tests.support.workload import make_request, random_requests

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=60)
@given(seed=SEEDS, num_ranks=st.integers(2, 6), num_requests=st.integers(1, 9), run_ahead=st.integers(0, 1))
def test_changes_fail_no_request(seed: int, num_ranks: int, num_requests: int, run_ahead: int) -> None:
    cluster = Cluster(RandomLayout(), num_ranks, seed, faults=Faults(change=0.05), run_ahead=run_ahead)
    cluster.run(random_requests(random.Random(seed), num_requests))
    assert {type(ending) for endings in cluster.endings.values() for ending in endings} == {cmd.CompleteRequest}
    assert cluster.reports == []


@settings(max_examples=60)
@given(seed=SEEDS, num_ranks=st.integers(3, 6), num_requests=st.integers(1, 9), run_ahead=st.integers(0, 1))
def test_changes_amid_faults(seed: int, num_ranks: int, num_requests: int, run_ahead: int) -> None:
    faults = Faults(task=0.05, cancel=0.01, rank_lost=0.01, late_report=0.05, change=0.03)
    cluster = Cluster(Equipartition(), num_ranks, seed, faults=faults, run_ahead=run_ahead)
    cluster.run(random_requests(random.Random(seed), num_requests))


def plane(num_ranks: int = 3, policy: Policy | None = None, **settings: Any) -> ControlPlane:
    ranks = [RankRecord(rank, frozenset({"m"})) for rank in range(num_ranks)]
    return ControlPlane(policy or Fcfs(), ranks, NominalCostModel(), **settings)


def dispatches(commands: list[cmd.Command]) -> list[cmd.RunTask]:
    return [command for command in commands if isinstance(command, cmd.RunTask)]


def finish(control: ControlPlane, task: cmd.RunTask, now_s: float) -> list[cmd.Command]:
    return [
        command
        for rank in task.layout.ranks
        for command in control.handle(ev.TaskFinished(task.dispatch_id, rank, 0.1), now_s)
    ]


def arrive(control: ControlPlane, copies: Iterable[cmd.Command]) -> list[cmd.Command]:
    return [
        command
        for copy in copies
        if isinstance(copy, cmd.Migrate)
        for rank in copy.ranks
        for command in control.handle(ev.MigrationFinished(copy.migration_id, rank), 0.3)
    ]


def test_the_next_decision_is_the_new_policys() -> None:
    """With its own arguments; what the last one had queued is taken back, and what runs goes on."""
    control = plane(policy=Fcfs(), run_ahead=1)
    (first,) = dispatches(control.handle(ev.RequestArrived(*make_request("a", prepare=False)), 0.0))
    (ahead,) = dispatches(control.handle(ev.LookAhead(), 0.1))
    assert ahead.after == first.dispatch_id
    commands = control.handle(ev.SettingsChanged(ev.PolicyChoice("fcfs", {"group_size": "2"})), 0.2)
    assert commands == [cmd.WithdrawTask(ahead.dispatch_id)]
    assert control.handle(ev.TaskWithdrawn(ahead.dispatch_id), 0.3) == []
    (step,) = dispatches(finish(control, first, 0.4))
    assert step.layout.parallel.size == 2, "the new policy's argument"
    control.check_integrity()


def test_settings_that_cannot_be_change_nothing() -> None:
    control = plane(max_queue_s=9.0)
    policy = control.policy
    control.handle(ev.RequestArrived(*make_request("a")), 0.0)
    good: dict[str, Any] = {"max_queue_s": 1.0, "drained": (1,)}
    for wrong in (ev.PolicyChoice("no such policy"), ev.PolicyChoice("fcfs", {"group_size": "no number"})):
        with pytest.raises(ValueError, match="policy"):
            control.handle(ev.SettingsChanged(wrong, **good), 1.0)
    request, graph = make_request("wide")
    wide = replace(graph, tasks=tuple(replace(task, candidates=(ParallelSpec(3),)) for task in graph.tasks))
    control.handle(ev.RequestArrived(request, wide), 1.0)
    line = (
        "request wide could not go on: its encode takes 3 ranks or more, and 2 of 3 are left while 1 are drained"
    )
    with pytest.raises(ValueError, match=line):
        control.handle(ev.SettingsChanged(ev.PolicyChoice("equipartition"), **good), 2.0)
    assert control.policy is policy and control.next_expiry_s == 9.0 and len(control.state.ranks.views) == 3
    control.check_integrity()


def test_limits_and_costs_are_in_force_at_once() -> None:
    control = plane(num_ranks=1)
    for name in ("a", "b"):
        control.handle(ev.RequestArrived(*make_request(name)), 0.0)
    assert control.next_expiry_s is None
    table = CostTable("h", "s", 0.0, 1.0, (CostEntry("m", TaskKind.DENOISE, 64, 64, 1, False, 1, 1, 1, 0.5),))
    control.handle(ev.SettingsChanged(ev.PolicyChoice("fcfs"), table, max_queue_s=5.0), 1.0)
    assert isinstance(control.cost, TableCostModel) and control.cost.table is table
    assert control.next_expiry_s == 5.0
    (end,) = control.handle(ev.WakeUp(), 6.0)
    assert isinstance(end, cmd.FailRequest) and end.request_id == "b" and end.waited
    control.handle(ev.SettingsChanged(ev.PolicyChoice("fcfs"), NOMINAL), 7.0)
    assert isinstance(control.cost, NominalCostModel)


def test_what_a_drained_rank_holds_goes_to_another_one() -> None:
    """Its step ends there; then it holds nothing, and joins again when it is wanted."""
    control = plane(num_ranks=2)
    (encode,) = dispatches(control.handle(ev.RequestArrived(*make_request("a", prepare=False)), 0.0))
    assert encode.layout.ranks == (0,)
    (other,) = dispatches(control.handle(ev.RequestArrived(*make_request("b", prepare=False)), 0.0))
    assert not control.handle(ev.SettingsChanged(drained=(0,)), 0.1), "what runs goes on"
    copies = finish(control, encode, 0.2)
    assert copies and all(isinstance(copy, cmd.Migrate) and copy.ranks == (0, 1) for copy in copies)
    assert not control.is_drained(0)
    (free,) = arrive(control, copies)
    assert isinstance(free, cmd.FreeArtifacts) and free.ranks == (0,)
    assert control.is_drained(0) and not control.is_away(0)
    (step,) = dispatches(finish(control, other, 0.4))
    assert step.layout.ranks == (1,) and not step.migrations, "the oldest goes on with what was handed on"
    assert step.tasks[0].request_id == "a"
    resets = control.handle(ev.SettingsChanged(drained=()), 0.5)
    assert [type(reset) for reset in resets] == [cmd.ResetEdges] * 2
    assert not control.state.ranks.free_in_order, "not before its edges are reset"
    for reset in resets:
        assert isinstance(reset, cmd.ResetEdges)
        for rank in (0, 1):
            control.handle(ev.EdgesReset(reset.reset_id, rank), 0.6)
    (back,) = dispatches(control.handle(ev.RequestArrived(*make_request("c")), 0.7))
    assert back.layout.ranks == (0,)
    control.check_integrity()


def test_copies_to_fall_back_on_are_kept_when_their_keeper_is_drained() -> None:
    control = plane(num_ranks=3, checkpoint_every_steps=1)
    commands = control.handle(ev.RequestArrived(*make_request("a", prepare=False)), 0.0)
    kept: list[cmd.Migrate] = []
    while not kept:
        (task,) = dispatches(commands)
        commands = finish(control, task, 0.1)
        kept = [command for command in commands if isinstance(command, cmd.Migrate) and command.keep]
    arrive(control, kept)
    ((keeper,),) = {copy.target.ranks for copy in kept}
    again = control.handle(ev.SettingsChanged(drained=(keeper,), checkpoint_every_steps=1), 0.2)
    moved = [copy for copy in again if isinstance(copy, cmd.Migrate) and copy.keep]
    assert {copy.artifact for copy in moved} == {copy.artifact for copy in kept}
    assert {copy.target.ranks for copy in moved} == {(3 - keeper,)}, "where neither the original is nor the copy"
    arrive(control, moved)
    assert control.is_drained(keeper)
    artifacts = control.state.requests["a"].artifacts
    assert {name for name, art in artifacts.items() if 3 - keeper in art.kept} == {copy.artifact for copy in kept}
    control.check_integrity()


def test_a_rank_that_is_drained_before_anything_runs_is_never_used() -> None:
    """As in a control process that replaces another one."""
    control = plane(num_ranks=2, drained=(0,))
    (task,) = dispatches(control.handle(ev.RequestArrived(*make_request("a")), 0.0))
    assert task.layout.ranks == (1,) and control.is_drained(0)
    control.handle(ev.RankLost(0, "it ended"), 1.0)
    assert control.is_away(0)
    control.handle(ev.RankJoined(0), 2.0)
    assert control.is_drained(0) and not control.is_away(0)
    control.check_integrity()
