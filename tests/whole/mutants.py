"""Planted bugs, each by a monkeypatch: the simulation must find every one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import ArtifactView
from gfdit.core.commands import ResetEdges
from gfdit.core.control import ControlPlane
from gfdit.core.control import plane as plane_module
from gfdit.core.control import state as state_module
from gfdit.core.control.artifact_budget import ArtifactBudget
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.holders import Holders
from gfdit.core.control.quarantine import Quarantine
from gfdit.core.control.ranks import RankPool
from gfdit.core.control.records import DispatchRecord, RequestRecord
from gfdit.core.control.residency import Residency
from gfdit.core.control.state import ClusterState
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy import Decision
from gfdit.core.policy.fallback import FirstComeFirstServed
from gfdit.migration import transfer
from gfdit.migration.parts import ArtifactParts
from gfdit.omni import http_front
from gfdit.omni.http_front import HttpFront, _Exchange
from gfdit.runtime import control_process
from gfdit.runtime.claims import Claims
from gfdit.runtime.client import ControlClient
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.made_by import MadeBy
from gfdit.runtime.messages import Reconfigured
from gfdit.runtime.streams import Streams
from gfdit.runtime.supervisor import Supervisor
from gfdit.runtime.time_limits import TimeLimits

Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Plant] = {}
WEATHER: dict[str, dict[str, Any]] = {}  # in which a storm finds them soon, of those that rare weather shows
# Where their storms begin: a run that showed it soon when ``python -m tests.whole --mutants`` was run last. If
# that run is another one by now, the storm goes on from there.
FROM_SEED: dict[str, int] = {
    "a-suspect-that-passes-its-probe-never-comes-back": 38,
    "the-next-step-is-queued-on-a-drained-rank": 35,
    "a-change-that-is-refused-is-made-by-half": 8,
    "a-control-process-that-hangs-is-left-alone": 22,
    "a-copy-that-failed-is-no-news": 23,
    "a-lane-runs-what-was-withdrawn": 43,
    "a-lost-rank-is-no-news": 8,
    "a-lost-rank-still-holds-its-artifacts": 28,
    "a-rewound-request-forgets-its-readers": 15,
    "a-sender-tells-parts-apart-by-their-shapes": 45,
    "a-worker-has-the-number-of-the-one-before": 3,
    "an-old-order-to-free-is-obeyed": 4,
    "consumed-inputs-count-as-kept": 46,
    "copies-arrive-whatever-happens": 1,
    "edges-are-not-reset-after-a-reconnect": 2,
    "edges-stay-broken-after-a-failed-collective": 2,
    "generations-begin-where-living-workers-have-been": 34,
    "lost-artifacts-are-not-made-again": 6,
    "memory-is-never-given-back": 8,
    "one-rank-speaks-for-all": 1,
    "ranks-that-are-gone-for-good-are-expected-after-a-reconnect": 10235,
    "requests-wait-for-as-long-as-it-takes": 4,
    "retries-have-no-end": 1,
    "silence-is-ignored": 54,
    "strays-are-not-freed-after-a-fault": 31,
    "what-is-still-being-made-is-freed-when-its-reader-is-done": 3453,
    "what-was-begun-is-withdrawn-all-the-same": 392,
    "a-worker-that-never-gets-ready-is-waited-for": 7,
    "a-load-that-ends-its-process-is-tried-for-ever": 20,
    "streams-stay-when-their-artifact-is-freed": 7,
}
# Those that a storm finds only after some seconds: not in `make test`.
# That take several times as long to be found as others do.
COSTLY = frozenset(
    {
        "a-rank-that-is-added-is-used-at-once",
        "a-server-that-is-to-stop-waits-for-whoever-runs",
        "a-suspect-that-passes-its-probe-never-comes-back",
        "a-worker-that-never-gets-ready-is-waited-for",
        "copies-to-fall-back-on-are-counted-on-before-they-are-there",
        "memory-is-never-given-back",
        "time-limits-never-fire",
        "who-is-given-up-is-told-that-all-is-well",
    }
)
RARE = frozenset(
    {
        "a-lane-runs-what-was-withdrawn",
        "a-sender-tells-parts-apart-by-their-shapes",
        "an-old-order-to-free-is-obeyed",
        "members-that-failed-hold-the-outputs-too",
        "ranks-that-are-gone-for-good-are-expected-after-a-reconnect",
        "requests-wait-for-as-long-as-it-takes",
        "strays-are-not-freed-after-a-fault",
        "what-is-still-being-made-is-freed-when-its-reader-is-done",
        "what-was-begun-is-withdrawn-all-the-same",
    }
)


def mutant(plant: Plant) -> Plant:
    MUTANTS[plant.__name__.replace("_", "-")] = plant
    return plant


def mutant_in(**weather: Any) -> Callable[[Plant], Plant]:
    """A planted bug that such weather shows, and that may be rare."""

    def add(plant: Plant) -> Plant:
        WEATHER[plant.__name__.replace("_", "-")] = weather
        return mutant(plant)

    return add


def _after(patch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """``change(answer, self, *arguments)`` replaces what a method answers."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *a, **k: change(original(self, *a, **k), self, *a, **k))


@mutant
def edges_stay_broken_after_a_failed_collective(patch: pytest.MonkeyPatch) -> None:
    _after(patch, EdgeResets, "among", lambda command, *_, **__: replace(command, edges=()))


@mutant
def a_rank_that_joined_is_used_at_once(patch: pytest.MonkeyPatch) -> None:
    def join(self: ControlPlane, event: ev.RankJoined) -> bool:
        if event.rank in self.state.ranks.lost:
            self.state.ranks.restore(event.rank)
        return True

    patch.setattr(ControlPlane, "_on_rank_joined", join)


@mutant
def generations_are_counted_by_reset_not_by_edge(patch: pytest.MonkeyPatch) -> None:
    def same(command: ResetEdges, *_: Any, **__: Any) -> ResetEdges:
        return replace(command, edges=tuple((one, other, 1) for one, other, _ in command.edges))

    _after(patch, EdgeResets, "among", same)
    _after(patch, EdgeResets, "of", same)


@mutant
def one_rank_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    """A dispatch closes with its first report."""

    def report(self: ControlPlane, dispatch: DispatchRecord, rank: int) -> bool:
        open_yet = rank in dispatch.waiting_for
        dispatch.waiting_for.clear()
        return open_yet

    patch.setattr(ControlPlane, "_report", report)


@mutant
def a_lost_rank_still_holds_its_artifacts(patch: pytest.MonkeyPatch) -> None:
    def drop(self: ClusterState, rank_id: int) -> None:
        self.ranks.drop(rank_id)
        for dispatch in self.dispatches.values():
            if rank_id in dispatch.layout.ranks:
                dispatch.lost |= {rank_id}

    patch.setattr(ClusterState, "drop_rank", drop)


@mutant_in(task_error=0.1, spurious_echo=0.1, deaths_per_s=0.3)
def members_that_failed_hold_the_outputs_too(patch: pytest.MonkeyPatch) -> None:
    original = Holders.task_succeeded

    def succeeded(self: Holders, record: Any, task: Any, dispatch: DispatchRecord) -> Any:
        dispatch.finished.update(dispatch.members)
        return original(self, record, task, dispatch)

    patch.setattr(Holders, "task_succeeded", succeeded)


@mutant_in(spurious_echo=0.3)
def consumed_inputs_count_as_kept(patch: pytest.MonkeyPatch) -> None:
    """A member that finished has dropped its inputs; the task runs again as if it had not."""
    patch.setattr(Holders, "task_failed", lambda self, record, task, dispatch: None)


@mutant
def copies_arrive_whatever_happens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_forget_unconfirmed", lambda self, dispatch: None)
    patch.setattr(ControlPlane, "_forget_copy", lambda self, migration, rank, layout: False)


@mutant
def an_input_is_not_brought(patch: pytest.MonkeyPatch) -> None:
    """Its last input is not brought to a layout."""
    _after(patch, Holders, "move_inputs", lambda moves, *_: moves[:-1])


@mutant
def artifacts_are_freed_one_reader_early(patch: pytest.MonkeyPatch) -> None:
    def greedy(self: Holders, task: Any, before: Any = ()) -> list[str]:
        artifacts = self._state.requests[task.request_id].artifacts
        return [name for name in task.inputs if artifacts[name].readers <= 2]

    patch.setattr(Holders, "last_reads", greedy)


@mutant
def strays_are_not_freed_after_a_fault(patch: pytest.MonkeyPatch) -> None:
    original = Holders._free

    def free(self: Holders, record: Any, name: str, dropped_by: set[int]) -> Any:
        record.has_strays = False
        return original(self, record, name, dropped_by)

    patch.setattr(Holders, "_free", free)


@mutant_in(deaths_per_s=0.5, longest_lag_s=20.0)
def copies_to_fall_back_on_are_counted_on_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    original = Checkpoints.after

    def after(self: Checkpoints, dispatch: DispatchRecord, record: Any) -> Any:
        moves = original(self, dispatch, record)
        for move in moves:
            record.artifacts[move.artifact].kept[move.target.ranks[0]] = move.target
        return moves

    patch.setattr(Checkpoints, "after", after)


@mutant
def a_cancelled_request_ends_while_it_runs(patch: pytest.MonkeyPatch) -> None:
    def end(self: ControlPlane, record: Any, terminal: Any) -> None:
        record.ending = record.ending or terminal
        self.state.withdraw_ready(record)
        if freed := self.state.remove(record):
            self._commands.append(freed)
        self._commands.append(record.ending)

    patch.setattr(ControlPlane, "_end", end)


@mutant
def a_late_report_ends_a_request_twice(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_cancelled

    def cancel(self: ControlPlane, event: ev.RequestCancelled) -> bool:
        if event.request_id not in self.state.requests and event.request_id != "nobody":
            self._commands.append(cmd.CancelRequest(event.request_id))
        return original(self, event)

    patch.setattr(ControlPlane, "_on_cancelled", cancel)


@mutant
def lost_artifacts_are_not_made_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterState, "lacking", lambda self: [])


@mutant
def retries_have_no_end(patch: pytest.MonkeyPatch) -> None:
    def retry(self: ControlPlane, record: Any, dispatch: DispatchRecord) -> None:
        if dispatch.caused_by_peer:
            self.state.recover(record)
        else:
            record.ending = cmd.FailRequest(record.request.id, str(dispatch.error), 500)

    patch.setattr(ControlPlane, "_retry_or_fail", retry)


@mutant
def a_rewound_request_forgets_its_readers(patch: pytest.MonkeyPatch) -> None:
    original = state_module.rewind

    def rewind(record: Any) -> list[Any]:
        before = {name: art.readers for name, art in record.artifacts.items()}
        withdrawn = original(record)
        for name, art in record.artifacts.items():
            art.readers = before[name]
        return withdrawn

    patch.setattr(state_module, "rewind", rewind)


@mutant_in(split=True, copy_error=0.3, longest_lag_s=0.001, max_queue_s=None)
def a_sender_tells_parts_apart_by_their_shapes(patch: pytest.MonkeyPatch) -> None:
    """Parts of equal shape are not always the same part."""

    def checked(parts: ArtifactParts, view: ArtifactView, layout: ExecutionLayout, rank: int) -> ArtifactParts:
        for spec in view.fields:
            extents = tuple(end - begin for begin, end in spec.box(layout, rank))
            if tuple(parts.tensors[spec.name].shape) != extents:
                raise transfer._OtherPartError(f"field {spec.name} has another shape")
        return parts

    patch.setattr(transfer, "_checked", checked)


# Lost wake-ups: the policy is not asked again after an event that frees ranks or makes tasks ready


@mutant
def a_lost_rank_is_no_news(patch: pytest.MonkeyPatch) -> None:
    _after(patch, ControlPlane, "_on_rank_lost", lambda *_: False)


@mutant
def edges_that_were_reset_are_no_news(patch: pytest.MonkeyPatch) -> None:
    _after(patch, EdgeResets, "on_reset", lambda *_: False)


@mutant
def a_copy_that_failed_is_no_news(patch: pytest.MonkeyPatch) -> None:
    _after(patch, ControlPlane, "_on_migration_finished", lambda *_: False)


@mutant
def memory_is_never_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ArtifactBudget, "release", lambda self, request_id: None)
    patch.setattr(ArtifactBudget, "check_integrity", lambda self, started: None)


# Claims, and which edition of an artifact stays


@mutant
def a_lane_runs_what_was_withdrawn(patch: pytest.MonkeyPatch) -> None:
    _after(patch, Claims, "begin", lambda *_: True)


@mutant_in(longest_delay_s=3.0, deaths_per_s=0.5)
def what_was_begun_is_withdrawn_all_the_same(patch: pytest.MonkeyPatch) -> None:
    _after(patch, Claims, "withdraw", lambda *_: True)


@mutant_in(longest_lag_s=20.0, spurious_echo=0.3)
def an_old_order_to_free_is_obeyed(patch: pytest.MonkeyPatch) -> None:
    original = MadeBy.forget
    patch.setattr(MadeBy, "forget", lambda self, artifacts, before=None: original(self, artifacts))


# A control process in the place of another


def _reconnected(patch: pytest.MonkeyPatch, change: Callable[[ev.Reconnected], ev.Reconnected]) -> None:
    original = ControlPlane._on_reconnected
    patch.setattr(ControlPlane, "_on_reconnected", lambda self, event: original(self, change(event)))


@mutant
def edges_are_not_reset_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_reconnected

    def reconnected(self: ControlPlane, event: ev.Reconnected) -> bool:
        news = original(self, event)
        resets = [command for command in self._commands if isinstance(command, ResetEdges)]
        self._commands = [command for command in self._commands if command not in resets]
        for reset in resets:
            for rank in reset.ranks:
                self._resets.on_reset(ev.EdgesReset(reset.reset_id, rank))
        return news

    patch.setattr(ControlPlane, "_on_reconnected", reconnected)


@mutant_in(control_deaths_per_s=0.5)
def a_part_is_taken_for_the_whole_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    def whole(event: ev.Reconnected) -> ev.Reconnected:
        holdings = tuple(
            (rank, tuple((name, ExecutionLayout((rank,)), view) for name, _, view in held))
            for rank, held in event.holdings
        )
        return replace(event, holdings=holdings)

    _reconnected(patch, whole)


@mutant_in(workflows=True)
def ranks_that_are_gone_for_good_are_expected_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_rank_lost
    patch.setattr(
        ControlPlane,
        "_on_rank_lost",
        lambda self, event: event.rank in self.state.ranks.present and original(self, event),
    )


@mutant
def a_request_is_forgotten_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    _reconnected(patch, lambda event: replace(event, requests=event.requests[:-1]))


@mutant
def a_request_is_not_resubmitted(patch: pytest.MonkeyPatch) -> None:
    original = ControlClient._resubmit

    def resubmit(self: ControlClient) -> None:
        alive = self._alive
        self._alive = dict(list(alive.items())[1:])
        original(self)
        self._alive = alive

    patch.setattr(ControlClient, "_resubmit", resubmit)


@mutant
def messages_of_an_earlier_control_process_are_obeyed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RuntimeConfig, "first_id", 0)


@mutant_in(control_deaths_per_s=0.3, deaths_per_s=1.0, longest_restart_s=0.1, longest_lag_s=0.5)
def generations_begin_where_living_workers_have_been(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control_process, "GENERATIONS_AHEAD", 0)


@mutant
def a_control_process_that_hangs_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlClient, "_end_if_hanging", lambda self: None)


# Workers that come and go


@mutant
def a_worker_has_the_number_of_the_one_before(patch: pytest.MonkeyPatch) -> None:
    original = Supervisor.remove

    def remove(self: Supervisor, rank: int) -> None:
        original(self, rank)
        self._ranks[rank].incarnation -= 1

    patch.setattr(Supervisor, "remove", remove)


@mutant_in(failed_start=0.5, deaths_per_s=0.3, dead_hosts_per_s=0.0)
def a_rank_is_given_up_after_its_first_failure(patch: pytest.MonkeyPatch) -> None:
    original = Supervisor.plan_start

    def plan_start(self: Supervisor, rank: int) -> bool:
        return self._ranks[rank].num_failures < 2 and original(self, rank)

    patch.setattr(Supervisor, "plan_start", plan_start)


@mutant_in(hangs_per_s=0.3)
def time_limits_never_fire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TimeLimits, "overdue", lambda self: {})


@mutant_in(stops_per_s=0.3)
def silence_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Supervisor, "silent", lambda self: {})


# Who is to blame


def _own_failures_only(**more: Any) -> dict[str, Any]:
    return {"faulty_ranks_per_s": 0.2, "faulty_share": 1.0, **more}


@mutant_in(**_own_failures_only())
def a_request_is_to_blame_for_its_first_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_is_to_blame", lambda self, record, dispatch: True)


@mutant_in(**_own_failures_only(probe_tells=1.0))
def a_probe_that_fails_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_rank_probed
    patch.setattr(
        ControlPlane,
        "_on_rank_probed",
        lambda self, event: original(self, ev.RankProbed(event.probe_id, event.rank)),
    )


@mutant_in(**_own_failures_only())
def a_rank_is_replaced_for_a_single_failure(patch: pytest.MonkeyPatch) -> None:
    _after(patch, Quarantine, "is_faulty", lambda *_: True)


@mutant_in(**_own_failures_only())
def a_suspect_that_passes_its_probe_never_comes_back(patch: pytest.MonkeyPatch) -> None:
    _after(patch, Quarantine, "settled", lambda *_: [])


@mutant_in(**_own_failures_only())
def a_suspect_is_given_tasks_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankPool, "suspend", lambda self, rank: None)


# A policy that errs, and requests that wait


@mutant_in(policy_lie=0.3)
def a_wrong_decision_is_carried_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plane_module, "check_dispatch", lambda *_, **__: None)


@mutant_in(policy_fault=0.5)
def nobody_decides_where_the_policy_cannot(patch: pytest.MonkeyPatch) -> None:
    _after(patch, FirstComeFirstServed, "schedule", lambda *_: Decision())


@mutant_in(max_queue_s=5.0)
def requests_wait_for_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_end_unstarted", lambda self: False)


@mutant_in(max_queue_s=5.0, control_deaths_per_s=0.3)
def who_has_started_waits_again_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    _reconnected(patch, lambda event: replace(event, started=()))


@mutant_in(longest_delivery_s=3.0, deaths_per_s=0.5)
def a_result_on_its_way_counts_as_delivered(patch: pytest.MonkeyPatch) -> None:
    def finish(self: ControlPlane, event: ev.TaskDelivering) -> bool:
        return self._on_finished(ev.TaskFinished(event.dispatch_id, event.rank, 0.0))

    patch.setattr(ControlPlane, "_on_delivering", finish)


@mutant_in(failed_start=0.9, deaths_per_s=0.5)
def a_worker_that_never_gets_ready_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    def only_ready(found: dict[int, str], self: Supervisor) -> dict[int, str]:
        return {rank: how for rank, how in found.items() if self.workers[rank].ready}

    _after(patch, Supervisor, "silent", only_ready)


# Components, and what is read while it is made


@mutant_in(workflows=True)
def an_unload_is_not_told(patch: pytest.MonkeyPatch) -> None:
    _after(patch, ClusterState, "begin_load", lambda command, *_: replace(command, evict=()))


@mutant_in(workflows=True)
def what_is_dropped_for_a_load_still_counts_as_there(patch: pytest.MonkeyPatch) -> None:
    original = RankPool.load
    patch.setattr(
        RankPool, "load", lambda self, rank_id, name, evicted, ends_s: original(self, rank_id, name, (), ends_s)
    )


@mutant_in(workflows=True, duplicate=0.5)
def a_load_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Where its answer comes twice."""
    original = Residency.end

    def end(self: Residency, load_id: int, *result: Any) -> Any:
        load = self.loading.get(load_id) or _ended.get((id(self), load_id))
        _ended[id(self), load_id] = load
        return original(self, load_id, *result) or load

    _ended: dict[tuple[int, int], Any] = {}
    patch.setattr(Residency, "end", end)


@mutant_in(workflows=True)
def a_component_counts_as_loaded_from_the_start(patch: pytest.MonkeyPatch) -> None:
    original = RankPool.load

    def load(self: RankPool, rank_id: int, name: str, evicted: Any, ends_s: float) -> None:
        original(self, rank_id, name, evicted, ends_s)
        self._set_resident(self.present[rank_id], self.present[rank_id].resident | {name})
        self.release(rank_id)

    patch.setattr(RankPool, "load", load)
    patch.setattr(RankPool, "end_load", lambda self, rank_id, name: None)


@mutant_in(workflows=True, load_error=0.5)
def a_load_that_failed_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_component_loaded
    patch.setattr(
        ControlPlane, "_on_component_loaded", lambda self, event: original(self, replace(event, error=""))
    )


@mutant_in(workflows=True, load_error=1.0)
def a_load_that_fails_is_tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    _after(patch, Residency, "why_not", lambda *_: "")


@mutant_in(workflows=True, deaths_per_s=0.5)
def a_load_that_ends_its_process_is_tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    def drop_rank(self: Residency, rank: int, *_: Any) -> list[str]:
        self.loading = {number: load for number, load in self.loading.items() if load.rank != rank}
        return []

    patch.setattr(Residency, "drop_rank", drop_rank)


@mutant_in(workflows=True, load_error=0.9)
def a_component_that_fails_ends_the_requests_of_others(patch: pytest.MonkeyPatch) -> None:
    def end_all(self: ControlPlane, component: str) -> None:
        if reason := self._residency.why_not(component, self._now_s):
            for record in [one for one in self.state.requests.values() if one.ending is None]:
                self._end(record, cmd.FailRequest(record.request.id, reason, 503))

    patch.setattr(ControlPlane, "_end_without", end_all)


@mutant_in(workflows=True)
def a_load_that_has_ended_is_no_news(patch: pytest.MonkeyPatch) -> None:
    _after(patch, ControlPlane, "_on_component_loaded", lambda *_: False)


@mutant_in(workflows=True, control_deaths_per_s=0.2, longest_lag_s=20.0)
def a_rank_that_is_late_is_taken_for_a_new_process(patch: pytest.MonkeyPatch) -> None:
    original = RankPool.restore
    patch.setattr(RankPool, "restore", lambda self, rank_id, resident=None: original(self, rank_id))


@mutant_in(workflows=True, policy_lie=0.3)
def a_load_against_the_rules_is_carried_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Residency, "check", lambda self, load, **_: load)


@mutant_in(workflows=True)
def who_reads_a_stream_is_ready_before_its_maker_runs(patch: pytest.MonkeyPatch) -> None:
    original = RequestRecord.num_lacking

    def only_whole(self: RequestRecord, task: Any) -> int:
        return original(self, replace(task, deferred=()))

    def note(self: RequestRecord) -> None:
        made(self)
        for task in self.graph.tasks:
            if task.id in self.missing and task.inputs:
                self.missing[task.id] = len(task.inputs)

    made = RequestRecord.__post_init__
    patch.setattr(RequestRecord, "__post_init__", note)
    patch.setattr(RequestRecord, "num_lacking", only_whole)
    patch.setattr(RequestRecord, "begin_streams", lambda self, task: None)


@mutant_in(workflows=True)
def what_is_still_being_made_is_freed_when_its_reader_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holders, "_making", lambda self, record, name: set())


@mutant_in(workflows=True)
def streams_stay_when_their_artifact_is_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "forget", lambda self, artifacts: None)


# Clients


@mutant_in(terminates=1.0)
def requests_that_run_are_cut_when_the_server_is_to_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(http_front, "_grace_s", lambda app: 0.0)


@mutant_in(terminates=1.0)
def a_server_that_is_to_stop_waits_for_whoever_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(http_front, "_grace_s", lambda app: 1e6)


@mutant_in(terminates=1.0)
def a_server_that_is_to_stop_takes_requests(patch: pytest.MonkeyPatch) -> None:
    def on_signal(self: HttpFront, app: Any) -> None:
        self._stop = asyncio.get_running_loop().create_task(self._drain(app))

    patch.setattr(HttpFront, "_on_signal", on_signal)


@mutant_in(terminates=1.0)
def who_is_given_up_is_told_that_all_is_well(patch: pytest.MonkeyPatch) -> None:
    original = _Exchange.receive

    async def receive(self: _Exchange) -> Any:
        message = await original(self)
        self._given_up = False
        return message

    patch.setattr(_Exchange, "receive", receive)


@mutant_in(deaths_per_s=0.5)
def errors_reach_clients_as_vllm_omni_makes_them(patch: pytest.MonkeyPatch) -> None:
    async def never(self: _Exchange, status: int, text: str) -> None:
        return None

    patch.setattr(_Exchange, "_retryable", never)


# What an operator changes


@mutant_in(changes_per_s=0.5)
def a_rank_is_put_aside_while_it_works(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_is_in_use", lambda self, rank: False)


@mutant_in(changes_per_s=0.5)
def a_rank_that_is_put_aside_keeps_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._put_aside

    def put_aside(self: ControlPlane, rank: int) -> None:
        original(self, rank)
        self._commands = [one for one in self._commands if not isinstance(one, cmd.FreeArtifacts)]

    patch.setattr(ControlPlane, "_put_aside", put_aside)


@mutant_in(changes_per_s=0.5)
def a_rank_that_is_added_is_used_at_once(patch: pytest.MonkeyPatch) -> None:
    def join(self: ControlPlane, rank: int, resident: tuple[str, ...] | None) -> bool:
        self.state.ranks.restore(rank, resident)
        return True

    patch.setattr(ControlPlane, "_join", join)


@mutant_in(changes_per_s=0.5)
def the_next_step_is_queued_on_a_drained_rank(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._may_ask

    def may_ask(self: ControlPlane, dispatch: DispatchRecord) -> bool:
        drained, self._drained = self._drained, set()
        answer = original(self, dispatch)
        self._drained = drained
        return answer

    patch.setattr(ControlPlane, "_may_ask", may_ask)


@mutant_in(changes_per_s=0.5, control_deaths_per_s=0.2)
def a_new_control_process_forgets_what_is_drained(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane.__init__

    def init(self: ControlPlane, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **(settings | {"drained": ()}))

    patch.setattr(ControlPlane, "__init__", init)


@mutant_in(changes_per_s=0.5, control_deaths_per_s=0.2)
def a_change_that_was_lost_counts_as_made(patch: pytest.MonkeyPatch) -> None:
    original = ControlClient._replace

    def replaced(self: ControlClient, *how: Any) -> None:
        original(self, *how)
        self._lost = [
            replace(answer, error="") if isinstance(answer, Reconfigured) else answer for answer in self._lost
        ]

    patch.setattr(ControlClient, "_replace", replaced)


@mutant_in(changes_per_s=0.5)
def a_change_that_is_refused_is_made_by_half(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_settings_changed

    def change(self: ControlPlane, event: ev.SettingsChanged) -> bool:
        if event.choice is not None:
            self._use_policy(self.load_policy(event.choice))
        return original(self, event)

    patch.setattr(ControlPlane, "_on_settings_changed", change)
