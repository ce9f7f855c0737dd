"""First come, first served, on worker groups of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

from gfdit.core import Decision, Dispatch, ExecutionLayout, SchedulerView, TaskView
from gfdit.core.layouts import widest


@dataclass
class Fcfs:
    """First come, first served: fixed groups of ranks, each running one request at a time.

    The baseline of the GF-DiT paper (section 6.1). Ranks form groups of ``group_size`` consecutive ids; the
    last group is smaller where the number does not divide, and so is one that lost a rank. A request goes,
    once, to the group with the least work ahead of it, among those that have its model. Every task runs at its
    widest specification that fits the group, on the group's first ranks. With ``group_size`` the number of ranks
    this is static sequence parallelism with a FIFO queue; with 1 it is one request per rank.
    """

    group_size: int = 1
    name = "fcfs"
    _group_of: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")

    def schedule(self, view: SchedulerView) -> Decision:
        groups: dict[int, list[int]] = {}
        for rank in view.ranks:
            groups.setdefault(rank.id // self.group_size, []).append(rank.id)
        self._group_of = {r: g for r, g in self._group_of.items() if r in view.requests and g in groups}
        for task in view.ready:
            if task.request_id not in self._group_of:
                self._assign(task, view, groups)
        free, dispatches = set(view.free_ranks), []
        # Oldest first: every task of a group needs its first rank, so its requests run one after the other.
        for task in view.ready:
            group = groups.get(self._group_of.get(task.request_id, -1), [])
            if spec := widest(view.cost.candidates(task), len(group)):
                ranks = tuple(group[: spec.size])
                if free.issuperset(ranks):
                    free.difference_update(ranks)
                    dispatches.append(Dispatch((task.id,), ExecutionLayout(ranks, spec)))
        return Decision(tuple(dispatches))

    def _assign(self, task: TaskView, view: SchedulerView, groups: dict[int, list[int]]) -> None:
        resident = {rank.id: rank.resident for rank in view.ranks}
        request = view.requests[task.request_id]
        work_s = {
            group: 0.0
            for group, ranks in groups.items()
            if all(task.model in resident[rank] for rank in ranks) and widest(request.candidates, len(ranks))
        }
        for request_id, group in self._group_of.items():
            if group in work_s:
                work_s[group] += self._remaining_s(request_id, view, groups[group])
        if work_s:
            self._group_of[task.request_id] = min(work_s, key=lambda group: work_s[group])

    def _remaining_s(self, request_id: str, view: SchedulerView, ranks: list[int]) -> float:
        request = view.requests[request_id]
        spec = widest(request.candidates, len(ranks)) or request.candidates[0]
        return view.cost.remaining_s(request, ExecutionLayout(tuple(ranks[: spec.size]), spec))
