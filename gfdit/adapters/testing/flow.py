"""One request under way in the kit: which of its tasks are left, and where its artifacts are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gfdit.adapters.testing.messages import How, Prepared, TaskRun
from gfdit.adapters.testing.outputs import Output
from gfdit.core.artifacts.views import UNKNOWN, ArtifactView
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Task, TaskKind, artifact_kind
from gfdit.policies.layout_script import layout_of


@dataclass
class Flow:
    """A request under way."""

    prepared: Prepared
    script: str
    tasks: list[Task]
    how: How
    holders: dict[str, dict[int, ExecutionLayout]] = field(default_factory=dict)
    views: dict[str, ArtifactView] = field(default_factory=dict)
    forwards: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    result: Output | None = None

    @property
    def request_id(self) -> str:
        return self.prepared.graph.request_id

    @property
    def is_over(self) -> bool:
        return not self.tasks

    @property
    def next(self) -> Task:
        return self.tasks[0]

    @property
    def layout(self) -> ExecutionLayout:
        """Of the next task."""
        return layout_of(self.script, self.next)

    @property
    def step_candidates(self) -> tuple[ParallelSpec, ...]:
        return next(task.candidates for task in self.tasks if task.kind is TaskKind.DENOISE)

    def check(self, num_ranks: int) -> None:
        """Raise ``ValueError`` for a layout that some task cannot have."""
        for task in self.tasks:
            try:
                layout = layout_of(self.script, task)
            except (ValueError, ZeroDivisionError) as error:
                raise ValueError(f"{self.script!r} is no script with a layout for steps: {error}") from error
            if layout.parallel not in task.candidates:
                allowed = ", ".join(map(str, task.candidates))
                raise ValueError(f"{task.kind} cannot run at {layout.parallel}; allowed: {allowed}")
            if len(set(layout.ranks)) != layout.parallel.size or not set(layout.ranks) <= set(range(num_ranks)):
                raise ValueError(f"{layout} does not name {layout.parallel.size} of {num_ranks} ranks")

    def done(self, layout: ExecutionLayout, views: dict[str, ArtifactView], run: TaskRun) -> None:
        """The next task has run; ``views`` are those of its outputs that are not like its inputs."""
        task = self.tasks.pop(0)
        for name in task.outputs:
            kind = artifact_kind(self.request_id, name)
            alike = [self.views[other] for other in task.inputs if artifact_kind(self.request_id, other) == kind]
            self.views[name] = views.get(name) or next(iter(alike), UNKNOWN)
            self.holders[name] = dict.fromkeys(layout.ranks, layout)
        if task.kind is TaskKind.DENOISE:
            self.forwards.append(run.num_forwards)
        if self.request_id in run.outputs:
            self.result = replace(run.outputs[self.request_id], forwards=tuple(self.forwards))

    def unread(self) -> list[str]:
        """Artifacts that no task will read any more."""
        needed = {name for task in self.tasks for name in task.inputs}
        return [name for name in self.holders if name not in needed]

    def output(self) -> Output:
        assert self.result is not None, f"{self.request_id} has no result"
        return self.result
