"""The control plane: a sans-I/O state machine from events to commands (design: GF-DiT paper, section 5.1).

``handle(event, now_s)`` is the whole interface. Sockets, clocks, devices and vLLM-Omni are the driver's
business; the online runtime and the simulator drive this same object.

Two rules keep group-free collectives safe. Commands come out in one order, and a driver hands each rank its
commands first in, first out: any two ranks therefore see the collectives they share in the same order. And a
rank runs one task at a time, so a group's members are all on the same task.

Its parts, each of which knows only those above it:

    state, edges    the books on requests, dispatches and ranks; edges that are reset
    artifacts       who holds what, what is to move, what is freed
    checkpoints     copies to fall back on
    migrations      copies under way
    run_ahead       the next step, queued behind a running one
    lifecycle       requests: arrive, go on or try again, end
    outcomes        dispatches: from reports to the books
    scheduling      the policy is asked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.artifact_budget import ArtifactBudget
from gfdit.core.control.artifacts import Artifacts
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.integrity import check_state
from gfdit.core.control.lifecycle import Lifecycle
from gfdit.core.control.look_ahead import LookAhead
from gfdit.core.control.migrations import Migrations
from gfdit.core.control.outcomes import Outcomes
from gfdit.core.control.records import RankRecord
from gfdit.core.control.run_ahead import RunAhead
from gfdit.core.control.scheduling import Scheduler
from gfdit.core.control.state import ClusterState
from gfdit.core.control.turn import Turn
from gfdit.core.cost import CostModel
from gfdit.core.policy import Policy


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
        max_retries: int = 3,
        checkpoint_every_steps: int = 0,
    ) -> None:
        """With ``run_ahead`` 1 a request's next step may be queued behind the running one, if the policy agrees;
        with 0 every step waits for a decision. With ``max_artifact_bytes`` requests start, in order of arrival,
        only when a rank has room for all they will hold. Raises ``ValueError`` for other numbers.
        """
        if run_ahead not in (0, 1):
            raise ValueError(f"run_ahead must be 0 or 1, got {run_ahead}")
        self.policy = policy
        self.cost = cost
        budget = ArtifactBudget(max_artifact_bytes)
        turn = self._turn = Turn()
        state = self.state = ClusterState(ranks, shows_bytes=bool(getattr(policy, "sees_memory", False)))
        resets = self._resets = EdgeResets(state.ranks)
        artifacts = Artifacts(state, counts_bytes=budget.limited)
        checkpoints = Checkpoints(state, checkpoint_every_steps)
        migrations = self.migrations = Migrations(state, artifacts, checkpoints, resets, turn)
        self._look_ahead = LookAhead(policy, state, cost, enabled=run_ahead > 0)
        ahead = RunAhead(self._look_ahead, state, artifacts, turn)
        lifecycle = self._lifecycle = Lifecycle(
            policy, cost, state, budget, checkpoints, migrations, ahead, turn, max_retries=max_retries
        )
        outcomes = self._outcomes = Outcomes(
            cost, state, artifacts, budget, resets, migrations, ahead, lifecycle, turn
        )
        self._scheduler = Scheduler(policy, cost, state, artifacts, resets, migrations, lifecycle, turn)
        # A handler says whether there is anything new for the policy.
        self._handlers: dict[type, Callable[[Any], bool]] = {
            ev.RequestArrived: lifecycle.on_arrived,
            ev.RequestCancelled: lifecycle.on_cancelled,
            ev.TaskDispatched: outcomes.on_begun,
            ev.TaskStarted: outcomes.on_begun,
            ev.TaskWithdrawn: outcomes.on_withdrawn,
            ev.TaskFinished: outcomes.on_finished,
            ev.TaskFailed: outcomes.on_failed,
            ev.MigrationFinished: migrations.on_finished,
            ev.EdgesReset: resets.on_reset,
            ev.RankLost: self._on_rank_lost,
            ev.RankJoined: self._on_rank_joined,
            ev.WakeUp: lambda event: True,
            ev.LookAhead: ahead.on_look_ahead,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[cmd.Command]:
        """Take one event in and return the commands that follow from it, in the order to emit them.

        Late events (of a task or request that has ended) are ignored. Raises ``ValueError`` for a malformed
        graph or a request id that is still alive.
        """
        turn = self._turn
        turn.begin(now_s)
        news = self._handlers[type(event)](event)
        if (self._lifecycle.at_the_door and self._lifecycle.let_in()) or news:
            self._look_ahead.outdate()
            self._scheduler.schedule()
        return turn.commands

    @property
    def wants_to_look_ahead(self) -> bool:
        """Whether a :class:`~events.LookAhead` would be of use, once nothing more urgent is to be handed in."""
        return self._look_ahead.next_due(self._turn.now_s) is not None

    @property
    def idle(self) -> bool:
        """Nothing is alive: no request, dispatch, migration or edge reset."""
        state = self.state
        return not (state.requests or state.dispatches or self.migrations.open or self._resets.any_open)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the bookkeeping contradicts itself."""
        check_state(self.state)
        self._lifecycle.check_integrity()
        self._resets.check_integrity()

    # Ranks that go and come

    def _on_rank_lost(self, event: ev.RankLost) -> bool:
        if event.rank not in self.state.ranks.present:
            return False
        self.state.drop_rank(event.rank)
        self._resets.drop(event.rank)
        self.migrations.drop(event.rank)
        self._outcomes.drop(event.rank, event.reason)
        for record in self.state.lacking():
            self.state.recover(record)
        return True

    def _on_rank_joined(self, event: ev.RankJoined) -> bool:
        """The rank is empty and its edges are those of a new process: it is used once all peers know."""
        state = self.state
        if event.rank not in state.ranks.lost:
            return False
        peers = tuple(state.ranks.present)
        state.ranks.restore(event.rank)
        if not peers:
            return True
        resets = [self._resets.of(state.new_id(), lane, event.rank, peers) for lane in ("compute", "migration")]
        self._turn.commands.extend(resets)
        return False
