"""A policy for measuring and for tests: each request brings its own layouts, in its ``slo_class``.

A script is a list of words: ``encode@3 prepare@1 decode@2,0`` name the ranks of those tasks (0 by default), and
``sp2@2,0`` or ``cfg2xsp2@3,1,0,2`` are the layouts of the denoising steps, repeated when steps outnumber them.
A further encoding task has its own name, ``encode_image@1``, or goes where encoding does.
Requests take turns, oldest first; a task waits until all its ranks are free. Denoising steps of requests whose
scripts say ``batch`` share a dispatch when their scripts and shapes agree and they wait at the same time; with
``batch=2`` they wait for each other until they are two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, SchedulerView, Task, TaskKind, TaskView


@dataclass
class LayoutScript:
    """Every task where its request says: for ``gfdit profile`` and for tests.

    ``interleave`` gives way, after every task, to the request that has waited longest.
    """

    interleave: bool = True
    name: str = field(default="layout-script", init=False)
    _last_turn: dict[str, int] = field(default_factory=dict, init=False)
    _turn: int = field(default=0, init=False)

    def schedule(self, view: SchedulerView) -> Decision:
        self._last_turn = {name: turn for name, turn in self._last_turn.items() if name in view.requests}
        free = set(view.free_ranks)
        chosen = []
        order = {task.id: index for index, task in enumerate(view.ready)}
        waiting = sorted(view.ready, key=lambda t: (self._last_turn.get(t.request_id, 0), order[t.id]))
        held = False
        while waiting:
            task = waiting.pop(0)
            script = view.requests[task.request_id].slo_class
            layout = layout_of(script, task)
            if not set(layout.ranks) <= free:
                continue
            batch, size = [task], batch_size(script) if task.kind is TaskKind.DENOISE else 1
            if size != 1:
                batch += [other for other in waiting if _alike(task, other, view)][: size - 1 if size else None]
                waiting = [other for other in waiting if other not in batch]
            if size and len(batch) < size:
                held = True
                continue
            free -= set(layout.ranks)
            chosen.append(Dispatch(tuple(t.id for t in batch), layout))
            self._turn += self.interleave
            self._last_turn.update((t.request_id, self._turn) for t in batch)
        # What waits for a partner is not forgotten.
        return Decision(tuple(chosen), wake_at_s=view.now_s + 1.0 if held else None)


def _alike(task: TaskView, other: TaskView, view: SchedulerView) -> bool:
    scripts = (view.requests[task.request_id].slo_class, view.requests[other.request_id].slo_class)
    same = (task.kind, task.model, task.shape, task.cfg) == (other.kind, other.model, other.shape, other.cfg)
    return same and scripts[0] == scripts[1]


def batch_size(script: str) -> int:
    """How many requests share a step: 0 is as many as there are."""
    for word in script.split():
        name, _, number = word.partition("=")
        if name == "batch":
            return int(number or 0)
    return 1


def layout_of(script: str, task: Task | TaskView) -> ExecutionLayout:
    words = dict.fromkeys(("encode", "prepare", "decode", "request"), ExecutionLayout((0,)))
    steps = []
    for word in script.split():
        if word.startswith("batch"):
            continue
        name, _, ranks_text = word.partition("@")
        ranks = tuple(int(rank) for rank in ranks_text.split(","))
        if name in words or name.startswith("encode_"):
            words[name] = ExecutionLayout(ranks, ParallelSpec(len(ranks)))
        else:
            steps.append(ExecutionLayout(ranks, parse_spec(name)))
    if task.kind is TaskKind.DENOISE:
        if not steps:
            raise ValueError(f"layout script {script!r} names no layout for a step, such as sp2@0,1")
        return steps[task.step_index % len(steps)]
    return words.get(task.id.removeprefix(f"{task.request_id}/"), words[task.kind])


def parse_spec(text: str) -> ParallelSpec:
    """``sp2``, ``cfg2`` or ``cfg2xsp2``."""
    degrees = {"sp": 1, "cfg": 1}
    for part in text.split("x"):
        kind = part.rstrip("0123456789")
        degrees[kind] = int(part[len(kind) :])
    return ParallelSpec(**degrees)
