"""The rules a decision must keep, checked before anything is dispatched, and how a mistake is told."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Mapping

from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy import Decision, Dispatch, PolicyError, RankView, TaskView

_CORE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def check_decision(decision: object, *, policy: str) -> None:
    """Raise :class:`PolicyError` unless ``decision`` is made of what the interface says."""

    def broken(what: str, value: object) -> PolicyError:
        return PolicyError(f"policy {policy!r} must return {what}, got {type(value).__name__}")

    if not isinstance(decision, Decision):
        raise broken("a Decision", decision)
    wake_at_s = decision.wake_at_s
    if wake_at_s is not None and not (isinstance(wake_at_s, (int, float)) and math.isfinite(wake_at_s)):
        raise PolicyError(f"policy {policy!r} must return a finite wake_at_s or None, got {wake_at_s!r}")
    for name, several in (("dispatches", decision.dispatches), ("loads", decision.loads)):
        if not isinstance(several, tuple):
            raise broken(f"Decision({name}=...) with a tuple, for a single one (it,)", several)
    for dispatch in decision.dispatches:
        if not isinstance(dispatch, Dispatch):
            raise broken("dispatches of type Dispatch", dispatch)
        if not isinstance(dispatch.tasks, tuple):
            raise broken("a tuple of task ids in each dispatch", dispatch.tasks)
        if not isinstance(dispatch.layout, ExecutionLayout):
            raise broken("an ExecutionLayout in each dispatch", dispatch.layout)
        if not isinstance(dispatch.layout.ranks, tuple):
            raise broken("a tuple of ranks in each layout", dispatch.layout.ranks)


def check_dispatch(
    dispatch: Dispatch,
    *,
    policy: str,
    ready: Mapping[str, TaskView],
    ranks: Mapping[int, RankView],
) -> None:
    """Raise :class:`PolicyError` naming policy, task and rule unless ``dispatch`` may run now."""

    def broken(rule: str) -> PolicyError:
        label = ", ".join(map(str, dispatch.tasks)) or "(none)"
        return PolicyError(f"policy {policy!r} broke a rule for task {label}: {rule}")

    if not dispatch.tasks:
        raise broken("a dispatch names at least one task")
    if len(dispatch.tasks) > 1 and len(set(dispatch.tasks)) != len(dispatch.tasks):
        raise broken("a dispatch names a task once")
    for name in dispatch.tasks:
        if name not in ready:
            raise broken(f"{name} is not ready")
    _check_ranks(dispatch.layout, ranks, broken)
    tasks = [ready[name] for name in dispatch.tasks]
    if len(tasks) > 1:
        _check_batch(tasks, broken)
    for task in tasks:
        if dispatch.layout.parallel not in task.candidates:
            allowed = ", ".join(map(str, task.candidates))
            raise broken(f"{task.kind} at {dispatch.layout.parallel} is not feasible, allowed: {allowed}")
        for rank in dispatch.layout.ranks:
            if task.model not in ranks[rank].resident:
                raise broken(f"model {task.model!r} is not loaded on rank {rank}")


def describe_mistake(policy: str, error: Exception) -> str:
    """What ``error``, which was raised while the policy was asked or its answer carried out, is called.

    The line is the policy's own, also where what it called raised.
    """
    if isinstance(error, PolicyError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    of_policy = next((frame.filename for frame in frames if not frame.filename.startswith(_CORE)), None)
    frame = [frame for frame in frames if of_policy in (None, frame.filename)][-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"policy {policy!r} failed in schedule at {place}: {error!r}"


def _check_ranks(
    layout: ExecutionLayout, ranks: Mapping[int, RankView], broken: Callable[[str], PolicyError]
) -> None:
    sp, cfg, num_ranks = layout.parallel.sp, layout.parallel.cfg, len(layout.ranks)
    if sp < 1 or cfg < 1 or sp * cfg != num_ranks:
        raise broken(f"sp x cfg must equal the number of ranks, got {sp} x {cfg} on {num_ranks}")
    if num_ranks > 1 and len(set(layout.ranks)) != num_ranks:
        raise broken(f"a rank is named twice in {layout.ranks}")
    for rank in layout.ranks:
        if (view := ranks.get(rank)) is None:
            raise broken(f"rank {rank} does not exist or is lost, ranks: {sorted(ranks)}")
        if view.running_request is not None:
            raise broken(f"rank {rank} is busy with request {view.running_request}")


def _check_batch(tasks: list[TaskView], broken: Callable[[str], PolicyError]) -> None:
    first = tasks[0]
    for task in tasks[1:]:
        same = (task.kind, task.model, task.cfg) == (first.kind, first.model, first.cfg)
        if not same or (task.shape != first.shape and task.shape.whole != first.shape.whole):
            raise broken(f"{task.id} cannot share a batch with {first.id}: kind, model, shape and cfg must agree")
