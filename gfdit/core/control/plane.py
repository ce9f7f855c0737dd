"""The control plane: a sans-I/O state machine from events to commands (design: GF-DiT paper, section 5.1).

``handle(event, now_s)`` is the whole interface. Sockets, clocks, devices and vLLM-Omni are the driver's
business; the online runtime and the simulator drive this same object.

Two rules keep group-free collectives safe. Commands come out in one order, and a driver hands each rank its
commands first in, first out: any two ranks therefore see the collectives they share in the same order. And a
rank runs one task at a time, so a group's members are all on the same task.

What decides is here, in the order in which a request meets it. What it decides on are modules of their own:

    state, records  the books on requests, tasks, dispatches and ranks, and the states they go through
    holders         who holds which part of an artifact, what is to move, what is freed
    checkpoints     copies to fall back on
    edges           edges between ranks that are reset
    recovery        which tasks run again after something was lost
    residency       which component is on which rank, and what cannot be loaded
    device_memory   what fits into the memory of a device, learned from what tasks took and what did not fit
    quarantine      ranks that fail: who is to blame, and what follows
    outlook         what the policy is shown ahead of time

An operator may drain a rank. It is *leaving* then: no policy sees it, what runs there goes on to its end, and what
it alone holds is copied to others, or made again if it cannot be. Then it is *aside*: it holds nothing and is in
the books as if it were lost, but its process stays, and joins again when the operator wants it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.components import Component, Load
from gfdit.core.control.artifact_budget import ArtifactBudget
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.device_memory import DeviceMemory
from gfdit.core.control.edges import LANES, EdgeResets
from gfdit.core.control.holders import Holders, has_succeeded
from gfdit.core.control.integrity import check_state
from gfdit.core.control.outlook import NextStep, Outlook
from gfdit.core.control.quarantine import Quarantine
from gfdit.core.control.records import (
    DispatchRecord,
    DispatchState,
    MigrationRecord,
    RankRecord,
    RequestRecord,
    TaskState,
)
from gfdit.core.control.recovery import is_lacking, restore
from gfdit.core.control.residency import Residency
from gfdit.core.control.state import ClusterState
from gfdit.core.cost import CostModel, UnknownCostError
from gfdit.core.cost.table import CostTable, cost_model
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import Admission, Decision, Dispatch, Policy, PolicyError, TaskView, batch_view
from gfdit.core.policy.fallback import FaultReports, FirstComeFirstServed
from gfdit.core.policy.loading import load_policy
from gfdit.core.policy.rules import check_decision, check_dispatch, describe_mistake
from gfdit.core.tasks import TaskKind

LOST_PART = "a rank was lost with its part of what was made"

SERVER_ERROR = 500
UNAVAILABLE = 503
TOO_LARGE = 400  # the status of a request that fits into no device's memory

NUM_WATCHED = 4
"""How many dispatches, of those that end next, the policy is asked about again after an event.

With hundreds of ranks, asking about all of them after every event would take longer than their steps. The others'
turn comes before they end; until then what the policy said last about them stands.
"""


def _load_policy(choice: ev.PolicyChoice) -> Policy:
    return load_policy(choice.policy, choice.args, choice.admission)


_by_end = attrgetter("ends_s")
_by_width = attrgetter("sp", "size")


class ControlPlane:
    """Owns every request from arrival to its one terminal command.

    Of a request whose task was lost with a rank, or with a copy, at most ``max_retries`` dispatches are repeated.
    Every ``checkpoint_every_steps`` steps, unless that is 0, what only one rank holds is copied to another.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Iterable[RankRecord],
        cost: CostModel,
        *,
        run_ahead: int = 0,
        max_artifact_bytes: int | None = None,
        device_memory_bytes: int | None = None,
        max_retries: int = 3,
        checkpoint_every_steps: int = 0,
        max_queue_s: float | None = None,
        components: Iterable[Component] = (),
        component_bytes: int | None = None,
        first_id: int = 0,
        drained: Iterable[int] = (),
    ) -> None:
        """With ``run_ahead`` 1 a request's next step may be queued behind the running one, if the policy agrees;
        with 0 every step waits for a decision. With ``max_artifact_bytes`` requests start, in order of arrival,
        only when a rank has room for all they will hold. ``device_memory_bytes`` is what tasks may take of a
        rank's memory, where that is not what ranks say. ``components`` are those of workflows, of which
        ``component_bytes`` fit on a rank. Dispatches, copies and resets are numbered from ``first_id`` on. Ranks
        in ``drained`` are given nothing. Raises ``ValueError`` for other numbers.
        """
        if run_ahead not in (0, 1):
            raise ValueError(f"run_ahead must be 0 or 1, got {run_ahead}")
        self.cost = cost
        self._residency = Residency(components, component_bytes)
        self.state = ClusterState(ranks, residency=self._residency)
        self.state.last_id = first_id
        self.migrations: dict[int, MigrationRecord] = {}  # those that some rank has still to report on
        self._max_retries = max_retries
        self._budget = ArtifactBudget(max_artifact_bytes)
        self._memory = DeviceMemory(device_memory_bytes, max_artifact_bytes)
        self._holders = Holders(self.state, counts_bytes=self._budget.limited)
        self._faults = FaultReports()
        self._quarantine = Quarantine()
        self._max_queue_s = max_queue_s
        self._unstarted: deque[RequestRecord] = deque()  # in order of arrival; some have started or ended since
        self._checkpoints = Checkpoints(self.state, checkpoint_every_steps)
        self._resets = EdgeResets(self.state.ranks)
        self._unseen: deque[RequestRecord] = deque()  # wait for memory, or have ended meanwhile
        self._run_ahead = run_ahead
        self._gone: set[int] = set()  # ranks that will not join again
        self._drained = set(drained)  # by an operator, however far that is
        self._aside: dict[int, tuple[str, ...] | None] = {}  # of them those that wait, with what they have loaded
        for rank in self._drained:
            self.state.ranks.leave(rank)
        self._use_policy(policy)
        # How a change makes another policy or cost model; a driver may have others made.
        self.load_policy: Callable[[ev.PolicyChoice], Policy] = _load_policy
        self.make_cost: Callable[[CostTable], CostModel] = cost_model
        # For operators: what has happened so far, and who wants to hear of each dispatch that went well.
        self.num_retries = self.num_suspicions = self.num_complaints = 0
        self.on_task_done: Callable[[DispatchRecord], None] | None = None
        self._version = 0  # of the books: another one once a policy may answer differently
        self._now_s = 0.0
        self._commands: list[cmd.Command] = []  # of the event at hand, in the order to emit them
        # A handler says whether there is anything new for the policy.
        self._handlers: dict[type, Callable[[Any], bool]] = {
            ev.RequestArrived: self._on_arrived,
            ev.RequestCancelled: self._on_cancelled,
            ev.TaskDispatched: self._on_begun,
            ev.TaskStarted: self._on_begun,
            ev.TaskWithdrawn: self._on_withdrawn,
            ev.TaskDelivering: self._on_delivering,
            ev.TaskFinished: self._on_finished,
            ev.TaskFailed: self._on_failed,
            ev.MemoryMeasured: self._on_memory_measured,
            ev.MigrationFinished: self._on_migration_finished,
            ev.EdgesReset: self._resets.on_reset,
            ev.RankProbed: self._on_rank_probed,
            ev.ComponentLoaded: self._on_component_loaded,
            ev.RankLost: self._on_rank_lost,
            ev.RankJoined: self._on_rank_joined,
            ev.Reconnected: self._on_reconnected,
            ev.SettingsChanged: self._on_settings_changed,
            ev.WakeUp: lambda event: True,
            ev.LookAhead: self._on_look_ahead,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        """Take one event in and return the commands that follow from it, in the order to emit them.

        Late events (of a task or request that has ended) are ignored. Raises ``ValueError`` for a malformed
        graph, a request id that is still alive, or settings that cannot be: then nothing has changed.
        """
        self._now_s = now_s
        self._commands = []
        news = self._handlers[type(event)](event)
        if self._max_queue_s is not None and self._unstarted:
            news |= self._end_unstarted()
        if self._quarantine.suspected:
            news |= self._settle_suspicions()
        self._go_ahead(news)
        # What ready tasks take along need not be handed on.
        while self._drained and self._settle_drains():
            self._go_ahead(True)
        return self._commands

    def _go_ahead(self, news: bool) -> None:
        """Schedule; again where that has ended a request, which leaves room for others: no event will tell."""
        while (self._unseen and self._let_in()) or news:
            news = False
            self._version += 1
            self._schedule()

    @property
    def wants_to_look_ahead(self) -> bool:
        """Whether a :class:`~events.LookAhead` would be of use, once nothing more urgent is to be handed in."""
        return self._next_to_ask() is not None

    @property
    def next_expiry_s(self) -> float | None:
        """When something ends by itself: a request's wait, or a rank's suspension. Hand a ``WakeUp`` in then."""
        moments_s = [] if (at_s := self._quarantine.next_expiry_s) is None else [at_s]
        if self._max_queue_s is not None and self._unstarted:
            moments_s.append(self._unstarted[0].request.arrival_s + self._max_queue_s)
        return min(moments_s, default=None)

    @property
    def idle(self) -> bool:
        """Nothing is alive: no request, dispatch, migration or edge reset."""
        state = self.state
        under_way = state.dispatches or self.migrations or self._residency.loading
        return not (state.requests or under_way or self._resets.any_open)

    def generations(self, one: int, other: int) -> dict[cmd.Lane, int]:
        """Of the edge between two ranks, the newest it was told to be in, by lane."""
        return self._resets.generations(one, other)

    def is_away(self, rank: int) -> bool:
        """Whether the process of ``rank`` is lost."""
        return rank in self.state.ranks.lost and rank not in self._aside

    def is_drained(self, rank: int) -> bool:
        """Whether ``rank`` holds nothing any more and waits until an operator wants it."""
        return rank in self._aside

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the bookkeeping contradicts itself."""
        check_state(self.state)
        self._budget.check_integrity({name for name, record in self.state.requests.items() if record.visible})
        self._resets.check_integrity()
        suspended = {rank.id for rank in self.state.ranks.present.values() if rank.suspended}
        self._quarantine.check_integrity(suspended, self.state.requests)
        present = self.state.ranks.present
        leaving = {rank.id for rank in present.values() if rank.leaving}
        assert leaving == self._drained & present.keys(), "other ranks are leaving than are drained"
        assert self._aside.keys() <= self._drained - present.keys(), "a rank is aside that is not drained"

    # ------------------------------------------------------------------------------------------------------------
    # Settings: what an operator changes while requests run

    def _use_policy(self, policy: Policy) -> None:
        """It is asked from now on."""
        self.policy = policy
        self.state.shows_bytes = bool(getattr(policy, "sees_memory", False))
        # Where the policy does not say what is loaded where, what is lacking is.
        self._fills_in = bool(self._residency.table) and not getattr(policy, "places_components", False)
        self._fallback = FirstComeFirstServed(policy.name)
        self._admit: Callable[..., Any] | None = getattr(policy, "admit", None)
        # Only a policy that says so is asked ahead: it must not mind a state that may never come to be.
        self._runs_ahead = self._run_ahead > 0 and bool(getattr(policy, "run_ahead", False))
        self._wakes = False  # it has asked to be asked again

    def _on_settings_changed(self, event: ev.SettingsChanged) -> bool:
        """All of it or, with a ``ValueError``, nothing."""
        policy = None if event.choice is None else self.load_policy(event.choice)
        cost = self.cost if event.costs is None else self.make_cost(event.costs)
        self._drain(set(event.drained))
        self._max_queue_s = event.max_queue_s
        self._unstarted = deque(record for record in self.state.requests.values() if not record.started)
        self._max_retries = event.max_retries
        self._checkpoints.every_steps = event.checkpoint_every_steps
        self.cost = cost
        if policy is not None:
            self._use_policy(policy)
            # What the last one had queued is taken back, unless a rank has begun it.
            for dispatch in list(self.state.dispatches.values()):
                self._withdraw_follower(dispatch)
        return True

    def _drain(self, drained: set[int]) -> None:
        """These, and no others, are drained from now on. ``ValueError`` if a request could not go on without."""
        before, self._drained = self._drained, drained
        for record in self.state.requests.values() if drained - before else ():
            if record.ending is None and (reason := self._lacks_ranks(record)):
                self._drained = before
                raise ValueError(f"request {record.request.id} could not go on: {reason}")
        ranks = self.state.ranks
        for rank in sorted(before ^ drained):
            if rank in self._aside:
                self._join(rank, self._aside.pop(rank))
            elif rank in ranks.present and rank in drained:
                ranks.leave(rank)
                self._withdraw_followers_on(rank)
            elif rank in ranks.present:
                ranks.stay(rank)

    def _withdraw_followers_on(self, rank: int) -> None:
        for dispatch in list(self.state.dispatches.values()):
            if rank in dispatch.layout.ranks:
                self._withdraw_follower(dispatch)

    def _settle_drains(self) -> bool:
        """Go on with ranks that are leaving; say whether one is aside now."""
        any_aside = False
        for rank in sorted(self._drained & self.state.ranks.present.keys()):
            if self._is_in_use(rank):
                continue
            moves, waits = self._checkpoints.hand_on(rank)
            self._begin_migrations(moves)
            if not (moves or waits):
                self._put_aside(rank)
                any_aside = True
        return any_aside

    def _is_in_use(self, rank: int) -> bool:
        record = self.state.ranks.present[rank]
        if not record.idle or record.suspended or self._resets.involves(rank):
            return True
        # Also by a result that is still on its way, from there or from a peer.
        return any([rank in dispatch.layout.ranks for dispatch in self.state.dispatches.values()]) or any(
            [rank in migration.members for migration in self.migrations.values()]
        )

    def _put_aside(self, rank: int) -> None:
        """It hears of nothing any more: all that it may still have, of requests that live, is freed now."""
        touching = [record for record in self.state.requests.values() if rank in record.touched]
        if names := [name for record in touching for name in record.artifacts]:
            self._commands.append(cmd.FreeArtifacts((rank,), tuple(names), self.state.last_id))
        resident = tuple(sorted(self.state.ranks.present[rank].resident))
        self._drop_rank(ev.RankLost(rank, "it is drained"))
        self._checkpoints.forget(rank)
        self._aside[rank] = resident

    # ------------------------------------------------------------------------------------------------------------
    # Requests: they arrive, are let in, go on after each of their tasks or try again, and end once

    def _on_arrived(self, event: ev.RequestArrived) -> bool:
        event.graph.check()
        request_id = event.request.id
        if request_id in self.state.requests:
            raise ValueError(f"request id {request_id!r} is already alive")
        record = self.state.new_record(event.request, event.graph)
        if (self._gone or self._drained or self._residency.table) and (reason := self._lacks_ranks(record)):
            self._commands.append(cmd.FailRequest(request_id, reason, UNAVAILABLE))
            return False
        if self._residency.table and (reason := self._lacks_component(record)):
            self._commands.append(cmd.FailRequest(request_id, reason, UNAVAILABLE))
            return False
        if self._memory.knows_anything:
            if too_large := self._refuse_too_large(record):
                self._commands.append(too_large)
                return False
            record.drop(self._too_large(record))
        if self._admit is not None and (refusal := self._ask_admission(record)):
            self._commands.append(refusal)
            return False
        self._add(record)
        return False

    def _add(self, record: RequestRecord) -> None:
        self.state.add(record)
        self._unseen.append(record)
        if self._max_queue_s is not None:
            self._unstarted.append(record)

    def _ask_admission(self, record: RequestRecord) -> cmd.Command | None:
        assert self._admit is not None
        try:
            answer = self._admit(record.view(), self.state.view(self._now_s, self.cost))
            if not isinstance(answer, Admission):
                raise TypeError(f"admit returned {type(answer).__name__}, not Admission")
        except Exception as error:
            self._complain(f"policy {self.policy.name!r} raised in admit: {error!r}")
            return None
        if answer.accepted:
            return None
        return cmd.RejectRequest(record.request.id, answer.reason, answer.retry_after_s)

    def _let_in(self) -> bool:
        """Show the policy the requests for whose artifacts there is room; say whether there are any."""
        any_new = False
        while self._unseen:
            record = self._unseen[0]
            if self.state.requests.get(record.request.id) is record:
                if self._budget.limited:
                    if not self._budget.fits(record.request):
                        break
                    self._budget.reserve(record.request)
                self.state.show(record)
                any_new = True
            self._unseen.popleft()
        return any_new

    def _end_unstarted(self) -> bool:
        """End the requests that have waited for too long; say whether there are any."""
        assert self._max_queue_s is not None
        any_ended = False
        while self._unstarted:
            record = self._unstarted[0]
            name, arrival_s = record.request.id, record.request.arrival_s
            if not record.started and self.state.requests.get(name) is record:
                if self._now_s < arrival_s + self._max_queue_s:
                    break
                wait_s = max(1, round(self._max_queue_s))
                message = f"no rank was free for it for {self._max_queue_s:g} s (retry after {wait_s} s)"
                self._end(record, cmd.FailRequest(name, message, status_code=503, waited=True))
                any_ended = True
            self._unstarted.popleft()
        return any_ended

    def _on_cancelled(self, event: ev.RequestCancelled) -> bool:
        if (record := self.state.requests.get(event.request_id)) is None:
            return False
        self._end(record, cmd.CancelRequest(event.request_id))
        return True

    def _go_on(self, dispatch: DispatchRecord, failed: set[str]) -> None:
        """With every request of a dispatch that is over; those in ``failed`` have tasks that did not succeed."""
        undecided = []
        if dispatch.out_of_memory and not dispatch.doomed:
            self._note_out_of_memory(dispatch)
        for request_id in dispatch.request_ids:
            record = self.state.requests[request_id]
            if record.ending is None:
                if request_id in failed:
                    self._retry_or_fail(record, dispatch)
                    if record.ending is None:
                        undecided.append(record)
                elif record.has_strays and is_lacking(record):
                    self.state.recover(record)
                if self._checkpoints.every_steps and request_id not in failed:
                    self._begin_migrations(self._checkpoints.after(dispatch, record))
            self._settle(record)
        if len(dispatch.culprits) == 1 and undecided and not (dispatch.doomed or dispatch.out_of_memory):
            (culprit,) = dispatch.culprits
            self._suspect(culprit, undecided, sending=culprit in dispatch.senders)

    def _retry_or_fail(self, record: RequestRecord, dispatch: DispatchRecord) -> None:
        error = dispatch.error or LOST_PART
        if dispatch.doomed:
            self.state.recover(record)  # it never had a chance
        elif dispatch.out_of_memory:
            self._widen_or_fail(record, dispatch)
        elif dispatch.culprits and self._is_to_blame(record, dispatch):
            record.ending = cmd.FailRequest(record.request.id, error, dispatch.status_code)
        elif record.num_retries == self._max_retries:
            message = f"{error} (after {record.num_retries} retries)"
            record.ending = cmd.FailRequest(record.request.id, message, status_code=503)
        else:
            record.num_retries += 1
            self.num_retries += 1
            self.state.recover(record)

    def _is_to_blame(self, record: RequestRecord, dispatch: DispatchRecord) -> bool:
        """Whether that a task of ``record`` failed by itself is its own fault, and not a rank's."""
        if dispatch.status_code < SERVER_ERROR:
            return True
        if len(dispatch.tasks) > 1:
            return False  # whose it is shows when each runs alone
        if len(dispatch.culprits) > 1:
            return True
        return bool(record.suspects) and all([self._quarantine.passed(rank) for rank in record.suspects])

    def _settle(self, record: RequestRecord) -> None:
        """End the request if it is over, else offer its next tasks."""
        if record.ending is not None:
            self._end(record, record.ending)
        elif record.num_finished == len(record.graph.tasks):
            self._end(record, cmd.CompleteRequest(record.request.id))
        else:
            self.state.offer_ready(record)

    def _end(self, record: RequestRecord, terminal: cmd.Command) -> None:
        """Emit the terminal command and free everything, once no task of the request runs any more."""
        record.ending = record.ending or terminal
        self.state.withdraw_ready(record)
        for dispatch_id in record.running:
            self._withdraw_follower(self.state.dispatches[dispatch_id])
        if record.running:
            return
        if record.suspects:
            self._quarantine.judge(record.request.id, guilty_rank=False)
        if freed := self.state.remove(record):
            self._commands.append(freed)
        self._budget.release(record.request.id)
        self._commands.append(record.ending)

    # ------------------------------------------------------------------------------------------------------------
    # Memory: what does not fit on a device is not offered (the rules are in ``device_memory``)

    def _on_memory_measured(self, event: ev.MemoryMeasured) -> bool:
        rank = self.state.ranks.present.get(event.rank)
        for model in rank.resident if rank is not None else ():
            for point in event.points:
                task = TaskView("", "", model, point.kind, 0, point.shape, point.cfg, (), ())
                self._memory.observe(event.rank, task, point.parallel, point.batch, point.use)
        return False

    def _too_large(self, record: RequestRecord) -> dict[TaskKind, frozenset[ParallelSpec]]:
        """Of each kind of task of ``record``, what is not to be offered.

        That is what it has tried itself and what does not fit; but the widest that it has not tried stays.
        """
        dropped = {}
        for kind, task in record.of_each_kind.items():
            excluded = self._memory.excluded(TaskView.of(record.request, task), task.candidates, self._now_s)
            untried = self._within_reach(record.untried(task), self._places(record, kind))
            fitting = [spec for spec in untried if spec not in excluded]
            if not fitting and untried:
                fitting = [max(untried, key=_by_width)]
            if fitting and len(fitting) < len(task.candidates):
                dropped[kind] = frozenset(task.candidates).difference(fitting)
        return dropped

    def _within_reach(self, specs: Iterable[ParallelSpec], num_ranks: int) -> list[ParallelSpec]:
        return [spec for spec in specs if spec.size <= num_ranks]

    def _num_places(self, component: str) -> int:
        """Ranks that there are, or will be, and that may have ``component``."""
        ranks, held, out = self.state.ranks, self._residency, self._gone | self._drained
        if component not in held.table:
            return ranks.num_known - len(out)
        known = (*ranks.present, *ranks.lost)
        return len([rank for rank in known if rank not in out and held.may_be_on(component, rank)])

    def _places(self, record: RequestRecord, kind: TaskKind) -> int:
        """For any task of ``kind`` that is left, whatever its component: memory is accounted for by kind."""
        parts = (record.parts_left or {}).items()
        places = [self._num_places(component) for (component, other), left in parts if left and other is kind]
        return min(places, default=self._num_places(""))

    def _lacks_ranks(self, record: RequestRecord) -> str:
        """Why some task of ``record`` can never run, if that is so."""
        for task in record.of_each_part:
            specs, places = record.offered(task), self._num_places(task.component)
            if not self._within_reach(specs, places):
                least = min(spec.size for spec in specs)
                of = f"of those that may have {task.component} {places}"
                left = of if task.component else f"{places} of {self.state.ranks.num_known}"
                why = f"while {len(self._drained)} are drained" if self._drained else "for good"
                return f"its {task.kind} takes {least} ranks or more, and {left} are left {why}"
        return ""

    def _refuse_too_large(self, record: RequestRecord) -> cmd.FailRequest | None:
        """At its arrival, a request of which some task fits nowhere."""
        for task in record.of_each_kind.values():
            view = TaskView.of(record.request, task)
            if self._memory.excluded(view, task.candidates, self._now_s).issuperset(task.candidates):
                reason = self._memory.describe(view, max(task.candidates, key=_by_width))
                return cmd.FailRequest(record.request.id, reason, TOO_LARGE)
        return None

    def _note_out_of_memory(self, dispatch: DispatchRecord) -> None:
        """What ``dispatch`` tried does not fit: nobody is offered it any more."""
        spec, batch = dispatch.layout.parallel, len(dispatch.tasks)
        self._memory.note_failure(dispatch.views[0], spec, batch, self._now_s)
        if batch == 1:
            (task,) = dispatch.tasks
            self.state.requests[task.request_id].exhausted.add((task.kind, spec))
        for record in self.state.requests.values():
            if (dropped := self._too_large(record)) != record.dropped:
                self.state.drop_specs(record, dropped)

    def _widen_or_fail(self, record: RequestRecord, dispatch: DispatchRecord) -> None:
        """After a task of ``record`` has run out of memory, for which neither it nor the rank is to blame.

        Of a batch each request goes on by itself.
        """
        task = next(task for task in dispatch.tasks if task.request_id == record.request.id)
        if self._within_reach(record.untried(task), self._places(record, task.kind)):
            self.state.recover(record)
        else:
            reason = self._memory.describe(TaskView.of(record.request, task), dispatch.layout.parallel)
            message = f"{reason} ({dispatch.error})"
            record.ending = cmd.FailRequest(record.request.id, message, SERVER_ERROR)

    # ------------------------------------------------------------------------------------------------------------
    # Scheduling: the policy is asked, and what it decides is carried out; its mistakes are contained

    def _schedule(self) -> None:
        """Ask the policy while tasks are ready and ranks free; where it fails, first come is first served."""
        state = self.state
        while state.ready.by_id:
            mistake = self._ask_policy()
            if mistake is not None:
                self._complain(f"{mistake}; first come, first served instead")
                self._fall_back()
            if state.take_streams_began() and state.has_work():
                continue  # what reads the stream may run beside it
            if self._quarantine.suspected:
                self._fall_back(suspects_only=True)
            if self._fills_in and state.has_work():
                self._fill_in()
            if not state.ready.by_id or state.dispatches or self._resets.held or self._residency.loading:
                return
            if self._release_suspects():
                continue  # nothing can go on without them
            if self._wakes or self._quarantine.suspected:
                return
            # No event would ever come, but of a rank that joins.
            if self._residency.table and self._end_hopeless(state.requests.values()):
                continue  # what they waited for may have been dropped since they came
            # A policy need not begin what it cannot finish.
            if runnable := state.runnable():
                if any([state.can_denoise(task) for task in runnable]):
                    self._complain(
                        f"policy {self.policy.name!r} left every rank idle with {len(state.ready.by_id)} tasks "
                        "ready; first come, first served instead"
                    )
                self._fall_back()
            return

    def _ask_policy(self) -> str | None:
        """Carry out what the policy decides; returns its mistake, if it makes one."""
        self._wakes = False
        state = self.state
        while state.ready.by_id and state.ranks.any_free:
            try:
                decision = self.policy.schedule(state.view(self._now_s, self.cost))
                check_decision(decision, policy=self.policy.name)
                return self._carry_out(decision)
            except UnknownCostError as error:
                if not self._end_unknown(error):
                    return describe_mistake(self.policy.name, error)
            except Exception as error:
                return describe_mistake(self.policy.name, error)
        return None

    def _fill_in(self) -> None:
        """Load what ready tasks lack everywhere, for a policy that does not care."""
        view = self.state.view(self._now_s, self.cost)
        for load in self._fallback.loads(view, view.free_ranks):
            self._load(load)

    def _load(self, load: Load) -> None:
        ends_s = self._now_s + self._residency.table[load.component].load_s
        self._commands.append(self.state.begin_load(load, ends_s))

    def _carry_out(self, decision: Decision) -> str | None:
        """Dispatch what keeps the rules; returns the first mistake."""
        mistake = None
        ready, ranks = self.state.ready.by_id, self.state.ranks
        for dispatch in decision.dispatches:
            try:
                check_dispatch(dispatch, policy=self.policy.name, ready=ready, ranks=ranks.views)
            except PolicyError as error:
                mistake = mistake or str(error)
            else:
                self._dispatch(dispatch)
        for load in decision.loads:
            try:
                self._load(
                    self._residency.check(load, policy=self.policy.name, ranks=ranks.views, now_s=self._now_s)
                )
            except PolicyError as error:
                mistake = mistake or str(error)
        if decision.wake_at_s is not None:
            if decision.wake_at_s > self._now_s:
                self._wakes = True
                self._commands.append(cmd.WakeAt(decision.wake_at_s))
            else:
                mistake = mistake or (
                    f"policy {self.policy.name!r} must return a wake_at_s later than now, "
                    f"{self._now_s}, got {decision.wake_at_s}"
                )
        return mistake

    def _fall_back(self, *, suspects_only: bool = False) -> None:
        """Decide in the policy's stead. A request of which the cost model knows nothing ends.

        With ``suspects_only`` about what has failed on a rank that is suspended, which is to run on another one
        even if the policy would rather wait.
        """
        requests = self.state.requests
        while self.state.has_work():
            view = self.state.view(self._now_s, self.cost)
            if suspects_only:
                view = replace(view, ready=tuple([t for t in view.ready if requests[t.request_id].suspects]))
            try:
                decision = self._fallback.schedule(view)
                for dispatch in decision.dispatches:
                    self._dispatch(dispatch)
                for load in decision.loads:
                    self._load(load)
                return
            except UnknownCostError as error:
                if not self._end_unknown(error):
                    return

    def _end_unknown(self, error: UnknownCostError) -> bool:
        """End the request of which the cost model knows nothing; False if it is not known which that is."""
        if (record := self.state.requests.get(error.request_id or "")) is None or record.ending is not None:
            return False
        message = describe_mistake(self.policy.name, error)
        self._complain(message)
        self._end(record, cmd.FailRequest(record.request.id, message))
        return True

    def _complain(self, message: str) -> None:
        """Report a fault of the policy, unless that was done lately."""
        self.num_complaints += 1
        if (report := self._faults.report(message, self._now_s)) is not None:
            self._commands.append(report)

    def _dispatch(self, dispatch: Dispatch) -> None:
        if len(dispatch.tasks) > 1:
            dispatch = self._fitting(self._without_suspects(dispatch))
        state, layout, now_s = self.state, dispatch.layout, self._now_s
        views = tuple([state.ready.by_id[name] for name in dispatch.tasks])
        tasks = tuple([state.requests[view.request_id].task(view.id) for view in views])
        busy_until_s = now_s + self.cost.task_s(batch_view(views), layout, len(tasks))
        migrations = [move for task in tasks for move in self._holders.move_inputs(task, layout)]
        if migrations:
            self._begin_migrations(migrations)
            busy_until_s += sum(self.cost.migration_s(view, layout) for view in views)
            if any([task.deferred for task in tasks]):
                busy_until_s = max(busy_until_s, self._made_by_s(migrations))
        consumes = tuple([name for task in tasks for name in self._holders.last_reads(task)])
        moves = tuple([migration.migration_id for migration in migrations]) if migrations else ()
        record = DispatchRecord(
            state.new_id(), tasks, views, layout, set(layout.ranks), consumes, migrations=moves
        )
        for task in tasks:
            owner = state.requests[task.request_id]
            if not owner.started:
                owner.started = True
                self._commands.append(cmd.StartRequest(owner.request.id, now_s - owner.request.arrival_s))
        state.occupy(record, busy_until_s)
        self._commands.append(cmd.RunTask(record.id, tasks, layout, tuple(migrations), consumes))

    def _without_suspects(self, dispatch: Dispatch) -> Dispatch:
        """A request that has failed lately runs alone:

        then it shows whose fault that was. The others' turn comes.
        """
        for name in dispatch.tasks:
            if self.state.requests[self.state.ready.by_id[name].request_id].suspects:
                return Dispatch((name,), dispatch.layout)
        return dispatch

    def _fitting(self, dispatch: Dispatch) -> Dispatch:
        """Only the first task of a batch that is too large for the memory of a device."""
        view, batch = self.state.ready.by_id[dispatch.tasks[0]], len(dispatch.tasks)
        if self._memory.excluded(view, (dispatch.layout.parallel,), self._now_s, batch):
            return Dispatch(dispatch.tasks[:1], dispatch.layout)
        return dispatch

    def _made_by_s(self, migrations: Iterable[cmd.Migrate]) -> float:
        """When everything should be there that is sent while it is made."""
        ends_s = [0.0]
        for move in migrations:
            if move.streamed:
                running = self.state.requests[move.request_id].running
                ends_s += [self.state.dispatches[number].ends_s for number in running]
        return max(ends_s)

    # ------------------------------------------------------------------------------------------------------------
    # Running ahead: a request's next step is queued behind the running one, and taken back if need be.
    #
    # The policy is asked again after whatever happens meanwhile: what is queued when a dispatch ends is what it
    # would have said at that moment, or nothing.

    def _next_to_ask(self) -> DispatchRecord | None:
        """The dispatch to ask the policy about next: it is new, or should have ended by now, or ends soon."""
        if not self._runs_ahead:
            return None
        now_s = self._now_s
        running = [d for d in self.state.dispatches.values() if d.behind is None]
        due = [d for d in running if d.asked_version < 0 or d.ends_s <= now_s]
        due += nsmallest(NUM_WATCHED, [d for d in running if d.ends_s > now_s], key=_by_end)
        due = [d for d in due if d.asked_version != self._version and self._may_ask(d)]
        return min(due, key=_by_end, default=None)

    def _may_ask(self, dispatch: DispatchRecord) -> bool:
        if dispatch.error is not None or dispatch.state is DispatchState.WITHDRAWING or dispatch.lost:
            return False
        for closed in (self._drained, self._quarantine.suspected):
            if closed and any([rank in closed for rank in dispatch.layout.ranks]):
                return False
        if not any([task.outputs for task in dispatch.tasks]):
            return False
        records = [self.state.requests[task.request_id] for task in dispatch.tasks]
        if any([record.ending or record.has_strays for record in records]):
            return False  # after a fault what ends next need not be what unblocks a task
        follower = self.state.follower(dispatch)
        return follower is None or follower.may_be_withdrawn

    def _on_look_ahead(self, event: ev.LookAhead) -> bool:
        """Ask the policy about the step after one that runs; queue it, leave it queued or take it back."""
        if (running := self._next_to_ask()) is None:
            return False
        following = None
        try:
            following = self._ask_ahead(running)
        except Exception as error:
            # Nobody is harmed: the policy is asked again when the step has ended.
            self._complain(describe_mistake(self.policy.name, error))
        if (follower := self.state.follower(running)) is not None:
            if following is None or following.tasks != follower.tasks:
                self._withdraw_follower(running)
        elif following is not None:
            self._queue(following, running)
        return False

    def _ask_ahead(self, dispatch: DispatchRecord) -> NextStep | None:
        """What the policy would go on with on the layout of ``dispatch``; None if that should wait and see.

        Raises what the policy or the cost model raises, and ``PolicyError`` for an answer against the rules.
        """
        dispatch.asked_version = self._version
        outlook = Outlook(self.state, dispatch)
        if not outlook.views:
            return None
        decision = self.policy.schedule(outlook.view(max(self._now_s, dispatch.ends_s), self.cost))
        check_decision(decision, policy=self.policy.name)
        for answer in decision.dispatches:
            if answer.layout == dispatch.layout and outlook.views.keys() >= set(answer.tasks):
                ranks = self.state.ranks.views_without(dispatch.layout.ranks)
                check_dispatch(answer, policy=self.policy.name, ready=outlook.views, ranks=ranks)
                first = outlook.views[answer.tasks[0]]
                if self._memory.excluded(first, (answer.layout.parallel,), self._now_s, len(answer.tasks)):
                    return None
                tasks = tuple([outlook.tasks[name] for name in answer.tasks])
                views = tuple([outlook.views[name] for name in answer.tasks])
                return NextStep(tasks, views, self.cost.task_s(batch_view(views), answer.layout, len(tasks)))
        return None

    def _queue(self, following: NextStep, running: DispatchRecord) -> None:
        tasks, layout = following.tasks, running.layout
        consumes = tuple([name for task in tasks for name in self._holders.last_reads(task, running.tasks)])
        record = DispatchRecord(
            self.state.new_id(), tasks, following.views, layout, set(layout.ranks), consumes, following.expected_s
        )
        self.state.queue(record, running)
        self._commands.append(cmd.RunTask(record.id, tasks, layout, (), consumes, after=running.id))

    def _withdraw_follower(self, dispatch: DispatchRecord) -> None:
        """Take back what is queued behind ``dispatch``, if anything is and no rank is known to have begun it."""
        follower = self.state.follower(dispatch)
        if follower is not None and follower.may_be_withdrawn:
            follower.move(DispatchState.WITHDRAWING)
            self._commands.append(cmd.WithdrawTask(follower.id))

    # ------------------------------------------------------------------------------------------------------------
    # Outcomes: a dispatch is over when each of its ranks has reported or was lost, or when it was withdrawn

    def _on_begun(self, event: ev.TaskDispatched | ev.TaskStarted) -> bool:
        self._note_begun(event.dispatch_id)
        return False

    def _on_finished(self, event: ev.TaskFinished) -> bool:
        # As _note_begun and _report do, without the calls: nothing happens more often.
        dispatch, rank = self.state.dispatches.get(event.dispatch_id), event.rank
        if dispatch is None or rank not in dispatch.waiting_for:
            return False
        if dispatch.state is not DispatchState.BEGUN:
            dispatch.move(DispatchState.BEGUN)
        dispatch.waiting_for.discard(rank)
        dispatch.finished.add(rank)
        if self._quarantine.past:
            self._quarantine.note_success(rank)
        dispatch.seconds = max(dispatch.seconds, event.seconds)
        if event.views:
            dispatch.made.update(event.views)
        if event.memory is not None:
            self._memory.observe(
                rank, dispatch.views[0], dispatch.layout.parallel, len(dispatch.tasks), event.memory
            )
        return self._close_if_done(dispatch)

    def _on_delivering(self, event: ev.TaskDelivering) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or event.rank not in dispatch.waiting_for:
            return False
        dispatch.delivering.add(event.rank)
        return self._close_if_done(dispatch)

    def _on_failed(self, event: ev.TaskFailed) -> bool:
        dispatch = self._note_begun(event.dispatch_id)
        if dispatch is None or not self._report(dispatch, event.rank):
            return False
        # The first error counts, but one of a rank's own before an echo.
        if dispatch.error is None or (dispatch.caused_by_peer and not event.caused_by_peer):
            dispatch.error, dispatch.status_code = event.error, event.status_code
            dispatch.caused_by_peer = event.caused_by_peer
        if event.out_of_memory:
            dispatch.exhausted = True
        elif not event.caused_by_peer:
            culprit = event.rank if event.culprit is None else event.culprit
            if culprit not in dispatch.culprits:
                dispatch.culprits += (culprit,)
            if event.culprit is not None:
                dispatch.senders |= {culprit}
        self._withdraw_follower(dispatch)
        return self._close_if_done(dispatch)

    def _on_withdrawn(self, event: ev.TaskWithdrawn) -> bool:
        dispatch = self.state.dispatches.get(event.dispatch_id)
        if dispatch is None or dispatch.state is not DispatchState.WITHDRAWING:
            return False
        if dispatch.behind is not None:
            self.state.unqueue(dispatch)
            return False
        self.state.undo(dispatch)
        if dispatch.doomed:
            self._reset_edges(dispatch.members)
        for request_id in dispatch.request_ids:
            record = self.state.requests[request_id]
            if record.has_strays and record.ending is None:
                self.state.recover(record)
            self._settle(record)
        return True

    def _note_begun(self, dispatch_id: int) -> DispatchRecord | None:
        """A rank has begun a dispatch: too late to take it back. None for one that is over."""
        dispatch = self.state.dispatches.get(dispatch_id)
        if dispatch is not None and dispatch.state is not DispatchState.BEGUN:
            dispatch.move(DispatchState.BEGUN)
        return dispatch

    def _report(self, dispatch: DispatchRecord, rank: int) -> bool:
        """Note that ``rank`` is done with ``dispatch``; False for a repeated report."""
        if rank not in dispatch.waiting_for:
            return False
        dispatch.waiting_for.discard(rank)
        return True

    def _close_if_done(self, dispatch: DispatchRecord) -> bool:
        """End a dispatch on which every rank has reported, or have it leave its ranks; False if neither is due.

        Ranks that report out of order may be done with a dispatch before the one that it is queued behind.
        """
        if dispatch.behind is not None:
            return False
        if dispatch.waiting_for:
            return self._leave_if_delivering(dispatch)
        state = self.state
        follower = None if dispatch.followed_by is None else state.dispatches[dispatch.followed_by]
        state.release(dispatch, DispatchState.OVER)
        if dispatch.error is None:
            self.cost.observe(batch_view(dispatch.views), dispatch.layout, dispatch.seconds, len(dispatch.tasks))
            if self.on_task_done is not None:
                self.on_task_done(dispatch)
        else:
            self._forget_unconfirmed(dispatch)
            self._forget_unsent(dispatch)
        failed = self._account(dispatch)
        # A member that failed may have stopped in the middle of a collective: its edges are out of step.
        disturbed = dispatch.error is not None or dispatch.lost
        through = dispatch.finished | dispatch.delivering
        out_of_step = dispatch.doomed or (disturbed and not through.issuperset(dispatch.members))
        if follower is not None:
            if out_of_step or failed:
                self._doom(follower, dispatch)
            state.promote(follower, self._now_s)
        elif out_of_step:
            self._reset_edges(dispatch.members)
        self._go_on(dispatch, failed)
        if follower is not None:
            self._close_if_done(follower)
        return True

    def _leave_if_delivering(self, dispatch: DispatchRecord) -> bool:
        """Free the ranks of a dispatch of which nothing but results is still to come; say whether they were not.

        Not after a fault: then edges may have to be reset before anything else runs there.
        """
        if dispatch.has_left or dispatch.error is not None or dispatch.lost or dispatch.doomed:
            return False
        if dispatch.followed_by is not None or not dispatch.waiting_for <= dispatch.delivering:
            return False
        self.state.leave(dispatch)
        return True

    def _account(self, dispatch: DispatchRecord) -> set[str]:
        """Book what was made and read; returns the requests with tasks that did not succeed."""
        state = self.state
        failed: set[str] = set()
        undisturbed = dispatch.error is None and not dispatch.lost
        for task in dispatch.tasks:
            record = state.requests[task.request_id]
            record.running.discard(dispatch.id)
            if not undisturbed:
                record.has_strays = True
            if undisturbed or has_succeeded(record, task, dispatch):
                self._commands.extend(self._holders.task_succeeded(record, task, dispatch))
                state.finish_task(record, task)
                if record.suspects:
                    self._quarantine.judge(record.request.id, guilty_rank=True)
                    record.suspects.clear()
                if self._budget.limited:
                    self._budget.observe(record.request, record.peak_bytes, record.steps_done)
            else:
                self._holders.task_failed(record, task, dispatch)
                record.move(task, TaskState.WAITING)  # until its request recovers, or ends
                failed.add(task.request_id)
        return failed

    @staticmethod
    def _doom(follower: DispatchRecord, failed: DispatchRecord) -> None:
        """A rank may have begun ``follower``, whose inputs it lacks: it fails too, and edges wait for it."""
        follower.doomed = True
        if follower.error is None:
            follower.error, follower.status_code, follower.caused_by_peer = failed.error or LOST_PART, 503, True

    def _reset_edges(self, ranks: tuple[int, ...]) -> None:
        """Nothing to do for a single rank: it has no edges."""
        if len(ranks) > 1:
            self._commands.append(self._resets.among(self.state.new_id(), "compute", ranks, hold=True))

    # ------------------------------------------------------------------------------------------------------------
    # Migrations: copies of artifacts under way, and who counts as a holder but may never be one

    def _begin_migrations(self, commands: Sequence[cmd.Migrate]) -> None:
        for command in commands:
            self.migrations[command.migration_id] = MigrationRecord.of(command)
        self._commands.extend(commands)

    def _on_migration_finished(self, event: ev.MigrationFinished) -> bool:
        """Say whether tasks are ready that were not."""
        migration = self.migrations.get(event.migration_id)
        if migration is None or event.rank not in migration.waiting_for:
            return False
        migration.waiting_for.discard(event.rank)
        migration.broken |= bool(event.error) and event.caused_by_peer
        sources = [transfer.source for transfer in migration.command.transfers]
        if event.rank in sources and not event.error:
            self._quarantine.note_success(event.rank, sending=True)
        recovered = False
        if migration.command.keep:
            self._commands += self._checkpoints.note(migration.command, event.rank, arrived=not event.error)
        if event.rank in migration.unconfirmed:
            layout = migration.unconfirmed.pop(event.rank)
            recovered = bool(event.error) and self._forget_copy(migration, event.rank, layout)
        self._close_migration_if_done(migration)
        return recovered

    def _forget_unconfirmed(self, dispatch: DispatchRecord) -> None:
        """Of a failed dispatch: reports overtake each other, so its copies may have failed as well."""
        for migration_id in dispatch.migrations:
            if (migration := self.migrations.get(migration_id)) is not None:
                command = migration.command
                for rank in migration.unconfirmed.keys() - dispatch.finished:
                    self._holders.set_holder(command.request_id, command.artifact, rank, None)
                migration.unconfirmed.clear()

    def _forget_unsent(self, dispatch: DispatchRecord) -> None:
        """What a rank has and cannot send is as good as lost: no other rank could go on with it."""
        for rank in dispatch.senders:
            for task in dispatch.tasks:
                for name in task.reads:
                    self._holders.set_holder(task.request_id, name, rank, None)

    def _forget_copy(self, migration: MigrationRecord, rank: int, layout: ExecutionLayout | None) -> bool:
        """A destination did not get its part, and has what it had before. Say whether that made tasks ready."""
        command = migration.command
        record = self._holders.set_holder(command.request_id, command.artifact, rank, layout)
        if record is None or record.ending is not None:
            return False
        self.state.recover(record)
        return True

    def _close_migration_if_done(self, migration: MigrationRecord) -> None:
        if migration.waiting_for:
            return
        del self.migrations[migration.command.migration_id]
        if migration.broken and len(migration.members) > 1:
            ranks = [rank for rank in migration.command.ranks if rank in migration.members]
            self._commands.append(self._resets.among(self.state.new_id(), "migration", ranks, hold=False))

    # ------------------------------------------------------------------------------------------------------------
    # Components (the rules are in ``residency``)

    def _on_component_loaded(self, event: ev.ComponentLoaded) -> bool:
        load = self._residency.end(event.load_id, event.seconds, event.num_bytes, event.error, self._now_s)
        if load is None:
            return False
        self.state.ranks.end_load(load.rank, None if event.error else load.component)
        if event.error:
            self._end_without(load.component)
        return True

    def _end_without(self, component: str) -> None:
        """A load has failed: if it is hopeless, end the requests that need it on more ranks than have it."""
        if self._residency.why_not(component, self._now_s):
            self._end_hopeless(self.state.needing(component))

    def _end_hopeless(self, records: Iterable[RequestRecord]) -> bool:
        """End those of ``records`` that lack a component for good; False if there are none."""
        alive = [record for record in records if record.ending is None]
        hopeless = [(record, reason) for record in alive if (reason := self._lacks_component(record))]
        for record, reason in hopeless:
            self._end(record, cmd.FailRequest(record.request.id, reason, UNAVAILABLE))
        return bool(hopeless)

    def _lacks_component(self, record: RequestRecord) -> str:
        """Why ``record`` cannot be served: what cannot be loaded, and is on fewer ranks than some task takes."""
        least: dict[str, int] = {}  # ranks, by component
        for task in record.graph.tasks:
            if task.component and record.states[task.id] is not TaskState.FINISHED:
                size = min([spec.size for spec in record.offered(task)], default=0)
                least[task.component] = max(least.get(task.component, 0), size)
        copies = Counter([name for rank in self.state.ranks.views.values() for name in rank.resident])
        short = [name for name in sorted(least) if copies[name] < least[name]]
        return next(filter(None, [self._residency.why_not(name, self._now_s) for name in short]), "")

    # ------------------------------------------------------------------------------------------------------------
    # Ranks that fail (the rules are in ``quarantine``), go and come

    def _suspect(self, rank: int, failed: list[RequestRecord], *, sending: bool) -> None:
        """``failed`` have failed on ``rank``, alone or together, or because it could not send what they read."""
        if rank not in self.state.ranks.present:
            return
        if rank not in self._quarantine.suspected:
            self.num_suspicions += 1
            self.state.ranks.suspend(rank)
            self._withdraw_followers_on(rank)
            probe = cmd.ProbeRank(self.state.new_id(), rank)
            self._commands.append(probe)
            self._quarantine.suspect(rank, probe.probe_id, self._now_s)
        self._quarantine.note_failures(rank, [record.request.id for record in failed], sending=sending)
        for record in failed:
            record.suspects.append(rank)

    def _on_rank_probed(self, event: ev.RankProbed) -> bool:
        if not self._quarantine.awaits(event.rank, event.probe_id):
            return False
        if event.error:
            self._condemn(event.rank, f"it fails its probe: {event.error}")
        else:
            self._quarantine.note_probe(event.rank)
        return True

    def _settle_suspicions(self) -> bool:
        """Give back the ranks about which everything is known; say whether there are any."""
        return self._resume(self._quarantine.settled(self._now_s))

    def _release_suspects(self) -> bool:
        """Nothing can go on without those that are suspected: give back what has passed its probe."""
        return self._resume(self._quarantine.settled(math.inf))

    def _resume(self, ranks: list[int]) -> bool:
        any_back = False
        for rank in ranks:
            if self._quarantine.is_faulty(rank):
                self._condemn(rank, "tasks of several requests failed on it, and went well elsewhere")
            else:
                self._quarantine.absolve(rank)
                self.state.ranks.resume(rank)
                any_back = True
        return any_back

    def _condemn(self, rank: int, reason: str) -> None:
        """Have the process of ``rank`` replaced; if that did not help before, give it up, but not the last."""
        hopeless = self._quarantine.condemn(rank)
        self._commands.append(cmd.RestartRank(rank, reason, hopeless and len(self.state.ranks.present) > 1))

    def _on_rank_lost(self, event: ev.RankLost) -> bool:
        any_news = event.rank in self.state.ranks.present
        self._aside.pop(event.rank, None)
        if any_news:
            self._drop_rank(event)
        if event.for_good and event.rank not in self._gone:
            self._gone.add(event.rank)
            for record in list(self.state.requests.values()):
                if record.ending is None and (reason := self._lacks_ranks(record)):
                    self._end(record, cmd.FailRequest(record.request.id, reason, UNAVAILABLE))
                    any_news = True  # others may have waited for its turn
        return any_news

    def _drop_rank(self, event: ev.RankLost) -> None:
        self.state.drop_rank(event.rank)
        self._resets.drop(event.rank)
        self._quarantine.drop(event.rank)
        loading = self._residency.drop_rank(event.rank, event.reason, self._now_s)
        for record in self.state.requests.values():
            if event.rank in record.suspects:
                record.suspects.remove(event.rank)
        self._drop_from_migrations(event.rank)
        self._drop_from_dispatches(event.rank, event.reason)
        for record in self.state.lacking():
            self.state.recover(record)
        for component in loading:
            self._end_without(component)

    def _drop_from_migrations(self, rank: int) -> None:
        for migration in list(self.migrations.values()):
            if rank in migration.members:
                migration.members.discard(rank)
                migration.waiting_for.discard(rank)
                migration.unconfirmed.pop(rank, None)
                if migration.command.keep:
                    self._checkpoints.note(migration.command, rank, arrived=False)
                self._close_migration_if_done(migration)

    def _drop_from_dispatches(self, rank: int, reason: str) -> None:
        """``rank`` will not report any more."""
        message = f"rank {rank} was lost: {reason}"
        for dispatch in list(self.state.dispatches.values()):
            if self._report(dispatch, rank):
                if dispatch.error is None or dispatch.caused_by_peer:  # it explains the echoes
                    dispatch.error, dispatch.status_code, dispatch.caused_by_peer = message, 503, True
                self._withdraw_follower(dispatch)
                self._close_if_done(dispatch)

    def _on_rank_joined(self, event: ev.RankJoined) -> bool:
        if event.rank not in self.state.ranks.lost:
            return False
        self._gone.discard(event.rank)
        if event.rank in self._drained:
            self._aside[event.rank] = event.resident
            return False
        return self._join(event.rank, event.resident)

    def _join(self, rank: int, resident: tuple[str, ...] | None) -> bool:
        """The rank holds no artifact, and its edges may be those of a new process: it is used once all peers know.

        Say whether it is used at once, since there are none.
        """
        state = self.state
        peers = tuple(state.ranks.present)
        state.ranks.restore(rank, resident)
        if not peers:
            return True
        for lane in LANES:
            self._commands.append(self._resets.of(state.new_id(), lane, rank, peers))
        return False

    def _on_reconnected(self, event: ev.Reconnected) -> bool:
        """Write the books anew from what is there: every request goes on from its last boundary that survives.

        Nothing is known of the edges, so all are reset. What is held for requests that have ended is freed.
        """
        state = self.state
        present = {rank for rank, _ in event.holdings}
        for rank in state.ranks.present.keys() - present:
            state.ranks.drop(rank)
        for rank, components in event.resident:
            state.ranks.note_resident(rank, frozenset(components))
        for request, graph in event.requests:
            record = state.new_record(request, graph)
            record.started = request.id in event.started
            record.touched.update(present)
            self._add(record)
        artifacts = {name: art for record in state.requests.values() for name, art in record.artifacts.items()}
        for rank, held in event.holdings:
            of_ended = tuple([name for name, _, _ in held if name not in artifacts])
            if of_ended:
                self._commands.append(cmd.FreeArtifacts((rank,), of_ended, state.last_id))
            for name, layout, view in held:
                if name in artifacts:
                    artifacts[name].holders[rank] = layout
                    artifacts[name].view = view
        for record in list(state.requests.values()):
            restore(record)
            if record.num_finished == len(record.graph.tasks):
                self._settle(record)  # only that was lost
        self._resets.skip_to(event.generation)
        if len(present) > 1:
            for lane in LANES:
                self._commands.append(self._resets.among(state.new_id(), lane, sorted(present), hold=True))
        return True
