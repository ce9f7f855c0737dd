"""The interface a scheduling policy implements, and the immutable view it decides on.

A policy sees every ready task and every rank, and answers with the tasks to run now, each on an execution
layout of its choice. It reads time from ``view.now_s`` alone, so the same object gives the same decisions in
the simulator and in production.

What is made anew for every task is a msgspec struct: it is made in a tenth of the time of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from gfdit.core.components import Component, Load
from gfdit.core.cost import CostModel
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.policy.changes import Offers
from gfdit.core.tasks import Request, Shape, Task, TaskKind


class TaskView(Struct, frozen=True, gc=False):
    """A ready task. ``artifacts`` pairs each input with the ranks that hold it.

    ``model`` is what its ranks must have loaded: the request's model, or a component of its workflow. A task with
    ``deferred`` inputs reads these on its way: until they are there, they come from ranks that run.
    """

    id: str
    request_id: str
    model: str
    kind: TaskKind
    step_index: int
    shape: Shape
    cfg: bool
    candidates: tuple[ParallelSpec, ...]
    artifacts: tuple[tuple[str, tuple[int, ...]], ...]
    deferred: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        request: Request,
        task: Task,
        artifacts: tuple[tuple[str, tuple[int, ...]], ...] = (),
        candidates: tuple[ParallelSpec, ...] | None = None,
    ) -> TaskView:
        """With ``candidates`` in the place of the task's own."""
        return cls(
            task.id,
            request.id,
            task.component or request.model,
            task.kind,
            task.step_index,
            request.shape,
            request.cfg,
            task.candidates if candidates is None else candidates,
            artifacts,
            task.deferred,
        )


def batch_view(views: Sequence[TaskView]) -> TaskView:
    """A dispatch of all ``views`` costs as one of so many of this: the first, computing as much as all on average.

    Times of steps are in proportion to tokens.
    """
    first = views[0]
    if len(views) == 1 or all([view.shape == first.shape for view in views]):
        return first
    percent = max(1, round(sum([view.shape.computed_percent for view in views]) / len(views)))
    return replace(first, shape=first.shape._replace(computed_percent=percent))


class RequestView(Struct, frozen=True, gc=False):
    """A live request. ``deadline_s`` is absolute; ``running``: one of its tasks is on a rank now.

    ``candidates`` are the specifications of its denoising steps, ``decode_candidates`` those of its decode task.
    Of a workflow ``parts`` says how many tasks are left of each component and kind; of other requests it is None,
    since all is of one model.
    """

    id: str
    model: str
    shape: Shape
    cfg: bool
    steps_done: int
    num_steps: int
    arrival_s: float
    deadline_s: float | None
    priority: int
    slo_class: str
    candidates: tuple[ParallelSpec, ...]
    tasks_left: Mapping[TaskKind, int]
    last_layout: ExecutionLayout | None
    running: bool
    decode_candidates: tuple[ParallelSpec, ...] = (SINGLE,)
    parts: Mapping[tuple[str, TaskKind], int] | None = None


class RankView(Struct, frozen=True, gc=False):
    """One rank. ``busy_until_s`` is an estimate, None when free; ``resident`` names the loaded models.

    ``artifact_bytes`` is what it holds now of artifacts, metadata left out: 0 unless the policy has the class
    attribute ``sees_memory = True``, since adding it up takes time. ``loading`` is a component that is on its way.
    """

    id: int
    busy_until_s: float | None
    running_request: str | None
    resident: frozenset[str]
    node: int
    artifact_bytes: int = 0
    loading: str = ""


class SchedulerView(Struct, frozen=True, gc=False):
    """Everything a policy may look at, valid during one ``schedule`` call.

    ``ready`` and ``requests`` are in order of arrival; ``free_ranks`` and ``ranks`` in order of rank id.
    ``components`` are those of workflows, of which ``component_bytes`` fit on a rank; None: however many. One that
    cannot be loaded for now may be on no rank, and is used where it is. ``offers`` is of the control plane: what
    :attr:`ready_by_request` and :class:`~gfdit.core.policy.changes.Changes` read.
    """

    now_s: float
    ready: tuple[TaskView, ...]
    requests: Mapping[str, RequestView]
    ranks: tuple[RankView, ...]
    free_ranks: tuple[int, ...]
    cost: CostModel
    components: Mapping[str, Component] = {}
    component_bytes: int | None = None
    offers: Offers | None = None

    @property
    def known_offers(self) -> Offers | None:
        """``offers``, unless a policy has put other tasks or requests into the view."""
        offers = self.offers
        if offers is not None and offers.ready is self.ready and offers.requests is self.requests:
            return offers
        return None

    @property
    def ready_by_request(self) -> Mapping[str, tuple[TaskView, ...]]:
        """``ready`` by request; without one of which nothing is ready."""
        if (offers := self.known_offers) is not None:
            return offers.by_request
        by_request: dict[str, tuple[TaskView, ...]] = {}
        for task in self.ready:
            by_request[task.request_id] = (*by_request.get(task.request_id, ()), task)
        return by_request


class Dispatch(Struct, frozen=True, gc=False):
    """Run these tasks (several: one batched step) on this layout now."""

    tasks: tuple[str, ...]
    layout: ExecutionLayout


class Decision(Struct, frozen=True, gc=False):
    """What to run now, what to load now, and when to ask again if nothing else happens before."""

    dispatches: tuple[Dispatch, ...] = ()
    wake_at_s: float | None = None
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer of a policy's optional ``admit(request: RequestView, view: SchedulerView)``."""

    accepted: bool
    reason: str = ""
    retry_after_s: float | None = None

    @classmethod
    def accept(cls) -> Admission:
        return cls(True)

    @classmethod
    def reject(cls, reason: str, retry_after_s: float | None = None) -> Admission:
        return cls(False, reason, retry_after_s)


class Policy(Protocol):
    """Implement ``schedule``; the constructor's keyword arguments are the policy's ``--policy-arg`` s.

    With the class attribute ``run_ahead = True`` it is also shown, while a step runs, the state as it should be
    once that step has ended. If it goes on with the same requests on the same layout, that is queued behind the
    step, and taken back if the policy says otherwise after an event before it begins. Such a policy may be asked
    about a moment that never comes: what it keeps must not depend on having answered.

    With the class attribute ``places_components = True`` it alone decides what is loaded where; for others, what
    ready tasks lack everywhere is loaded as :class:`~gfdit.core.policy.placing.Placer` says.
    """

    name: str

    def schedule(self, view: SchedulerView) -> Decision: ...


class PolicyError(Exception):
    """A decision broke a rule. The message names policy, task and rule."""
