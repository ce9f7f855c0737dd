"""Going on after artifacts were lost: back to the last task boundary that survives (GF-DiT paper, section 5.1)."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType

from gfdit.core.control.records import ArtifactState, RequestRecord
from gfdit.core.tasks import Task, TaskKind


def is_lacking(record: RequestRecord) -> bool:
    """Whether a part of something that was made and not freed is on no rank any more."""
    return any(not art.view.covered_by(art.holders) for art in record.live_artifacts)


def rewind(record: RequestRecord, running: set[str]) -> list[str]:
    """Have the fewest finished tasks run again without which an unfinished one cannot run.

    ``running`` are the ids of tasks in flight: they have their inputs, or will fail and come back here. Tasks
    that can run are in ``record.unblocked`` afterwards; returns those that were offered and cannot any more.
    """
    record.scattered = True
    again = _needed_again(record, running)
    record.finished.difference_update(task.id for task in again)
    _set_artifacts(record)
    _set_counts(record)
    return _set_tasks(record, running)


def _needed_again(record: RequestRecord, running: set[str]) -> list[Task]:
    makers = {name: task for task in record.graph.tasks for name in task.outputs}
    lacking = [task for task in record.graph.tasks if task.id not in record.finished | running]
    again: dict[str, Task] = {}
    while lacking:
        for name in lacking.pop().inputs:
            maker = makers[name]
            art = record.artifacts[name]
            if (
                not (art.view.covered_by(art.holders) or art.kept)
                and maker.id in record.finished
                and maker.id not in again
            ):
                again[maker.id] = maker
                lacking.append(maker)
    return list(again.values())


def _set_artifacts(record: RequestRecord) -> None:
    for name, art in record.artifacts.items():
        art.readers = sum(task.id not in record.finished for task in record.consumers[name])
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
    left = Counter({task.kind: 0 for task in tasks})
    left.update(task.kind for task in tasks if task.id not in record.finished)
    record.tasks_left = MappingProxyType(dict(left))
    record.steps_done = sum(task.kind is TaskKind.DENOISE and task.id in record.finished for task in tasks)


def _set_tasks(record: RequestRecord, running: set[str]) -> list[str]:
    record.waiting.clear()
    record.unblocked.clear()
    withdrawn = []
    for task in record.graph.tasks:
        if task.id in record.finished or task.id in running:
            continue
        states = [record.artifacts[name].state for name in task.inputs]
        if num_missing := sum(state is not ArtifactState.MATERIALIZED for state in states):
            record.waiting[task.id] = num_missing
            if task.id in record.offered:
                withdrawn.append(task.id)
        elif task.id not in record.offered:
            record.unblocked.append(task)
    return withdrawn
