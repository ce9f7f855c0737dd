"""Going on after artifacts were lost: back to the last task boundary that survives (GF-DiT paper, section 5.1)."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from gfdit.core.control.records import ArtifactRecord, ArtifactState, RequestRecord, TaskState
from gfdit.core.tasks import Task, TaskKind


def is_lacking(record: RequestRecord) -> bool:
    """Whether a part of something that was made and not freed is on no rank any more."""
    return any(not art.view.covered_by(art.holders) for art in record.live_artifacts)


def restore(record: RequestRecord) -> None:
    """Of a request of which only the holders of its artifacts are known: what they hold need not be made again.

    Whatever an artifact that is there was made from has been made, too, even if that is gone by now.
    """
    makers = {name: task for task in record.graph.tasks for name in task.outputs}
    done = [makers[name] for name, art in record.artifacts.items() if _is_there(art)]
    while done:
        task = done.pop()
        if record.states[task.id] is not TaskState.FINISHED:
            record.states[task.id] = TaskState.FINISHED  # as it was in the books that are lost
            done += [makers[name] for name in task.reads]
    record.num_finished = list(record.states.values()).count(TaskState.FINISHED)
    record.unblocked = [task for task in record.unblocked if record.states[task.id] is TaskState.UNBLOCKED]
    for art in record.artifacts.values():
        if _is_there(art):
            art.state, art.layout = ArtifactState.MATERIALIZED, next(iter(art.holders.values()))
        else:
            made = record.states[makers[art.id].id] is TaskState.FINISHED
            art.state, art.holders = ArtifactState.FREED if made else ArtifactState.PENDING, {}
    rewind(record)


def _is_there(art: ArtifactRecord) -> bool:
    return bool(art.holders) and art.view.covered_by(art.holders)


def rewind(record: RequestRecord) -> list[Task]:
    """Have the fewest finished tasks run again without which an unfinished one cannot run.

    Tasks that run have their inputs, or will fail and come back here. Tasks that can run are in
    ``record.unblocked`` afterwards; returns those that are ready and cannot run any more.
    """
    record.has_strays = True
    again = _needed_again(record)
    for task in again:
        record.move(task, TaskState.WAITING)
    record.num_finished -= len(again)
    _set_artifacts(record)
    _set_counts(record)
    return _set_tasks(record)


def _needed_again(record: RequestRecord) -> list[Task]:
    makers = {name: task for task in record.graph.tasks for name in task.outputs}
    states = record.states
    has_inputs = (TaskState.FINISHED, TaskState.RUNNING)
    lacking = [task for task in record.graph.tasks if states[task.id] not in has_inputs]
    again: dict[str, Task] = {}
    while lacking:
        for name in lacking.pop().reads:
            maker = makers[name]
            art = record.artifacts[name]
            if (
                not (art.view.covered_by(art.holders) or art.kept)
                and states[maker.id] is TaskState.FINISHED
                and maker.id not in again
            ):
                again[maker.id] = maker
                lacking.append(maker)
    return list(again.values())


def _set_artifacts(record: RequestRecord) -> None:
    for name, art in record.artifacts.items():
        art.readers = sum(record.states[task.id] is not TaskState.FINISHED for task in record.consumers[name])
        if art.view.covered_by(art.holders):
            continue
        if art.readers and art.kept:
            art.state, art.holders = ArtifactState.MATERIALIZED, dict(art.kept)
            art.layout = next(iter(art.kept.values()))
        elif art.state is not ArtifactState.PENDING:
            # Pending as well if only running tasks read it: should they fail, it is made again.
            art.state = ArtifactState.PENDING if art.readers else ArtifactState.FREED
            art.layout, art.holders = None, {}


def _set_counts(record: RequestRecord) -> None:
    tasks = record.graph.tasks
    finished = [task for task in tasks if record.states[task.id] is TaskState.FINISHED]
    left = Counter(task.kind for task in tasks)
    left.subtract(task.kind for task in finished)
    record.tasks_left = MappingProxyType(dict(left))
    if record.parts_left is not None:
        parts = Counter((task.component, task.kind) for task in tasks)
        parts.subtract((task.component, task.kind) for task in finished)
        record.parts_left = MappingProxyType(dict(parts))
    record.steps_done = sum(task.kind is TaskKind.DENOISE for task in finished)


def _set_tasks(record: RequestRecord) -> list[Task]:
    states = record.states
    record.missing.clear()
    for task in record.unblocked:
        record.move(task, TaskState.WAITING)
    record.unblocked.clear()
    blocked = []
    for task in record.graph.tasks:
        if states[task.id] in (TaskState.FINISHED, TaskState.RUNNING):
            continue
        if num_missing := record.num_lacking(task):
            record.missing[task.id] = num_missing
            if states[task.id] is TaskState.READY:
                blocked.append(task)
        elif states[task.id] is TaskState.WAITING:
            record.move(task, TaskState.UNBLOCKED)
            record.unblocked.append(task)
    return blocked
