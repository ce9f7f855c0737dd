"""What decides where the policy cannot: it raised, broke a rule, or does not come back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from gfdit.core.commands import ReportFault
from gfdit.core.components import Load
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy.interface import Decision, Dispatch, SchedulerView
from gfdit.core.policy.placing import Placer, copies_of, loads_in_advance


class FirstComeFirstServed:
    """Every ready task, the oldest first, at its narrowest specification on the free ranks that have its model.

    It knows no cost and keeps nothing: there is nothing that could go wrong.
    """

    run_ahead = True

    def __init__(self, instead_of: str) -> None:
        self.name = f"first come, first served instead of {instead_of}"
        self._placer = Placer()

    def schedule(self, view: SchedulerView) -> Decision:
        free = list(view.free_ranks)
        resident = {rank.id: rank.resident for rank in view.ranks}
        dispatches = []
        for task in view.ready:
            spec = min(task.candidates, key=lambda spec: (spec.size, spec.sp))
            held = {rank for _, holders in task.artifacts for rank in holders}
            able = [rank for rank in free if task.model in resident[rank]]
            # Those that hold its inputs first: then there is less to move.
            ranks = tuple(sorted(sorted(able, key=lambda rank: (rank not in held, rank))[: spec.size]))
            if len(ranks) == spec.size:
                dispatches.append(Dispatch((task.id,), ExecutionLayout(ranks, spec)))
                free = [rank for rank in free if rank not in ranks]
        return Decision(tuple(dispatches), loads=self.loads(view, free))

    def loads(self, view: SchedulerView, free: Sequence[int]) -> tuple[Load, ...]:
        """On ranks in ``free``: what ready tasks lack everywhere, then what requests want, where there is room."""
        if not view.components:
            return ()
        self._placer.note(view)
        loads = list(self._placer.missing(view, free))
        busy = {load.rank for load in loads}
        idle = [rank for rank in view.ranks if rank.id in free and rank.id not in busy]
        wanted: Counter[str] = Counter()
        for request in view.requests.values():
            for (name, _), count in (request.parts or {}).items():
                wanted[name] += count
        copies = copies_of(view.ranks) + Counter([rank.loading for rank in view.ranks if rank.loading])
        return (*loads, *loads_in_advance(idle, +wanted, copies, view))


REPEAT_S = 60.0
_NAMES_AND_NUMBERS = re.compile(r"\S*/\S*|(?<!\S)[\d.,:]+(?!\S)")
MAX_FAULTS = 256


class FaultReports:
    """Says what is wrong with a policy once, and again only if it still is after ``REPEAT_S``."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}  # when, and how often it came since

    def report(self, message: str, now_s: float) -> ReportFault | None:
        kind = _NAMES_AND_NUMBERS.sub("", message)  # alike, but for names of tasks and numbers
        told_s, num_since = self._told.get(kind, (-REPEAT_S, 0))
        if 0 <= now_s - told_s < REPEAT_S:
            self._told[kind] = told_s, num_since + 1
            return None
        if len(self._told) >= MAX_FAULTS:
            self._told.clear()
        self._told[kind] = now_s, 0
        again = f" (and {num_since} times more since it was last said)" if num_since else ""
        return ReportFault(message + again)
