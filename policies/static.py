"""Whole requests, first in, first out, each on the full machine."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, RequestView, SchedulerView
from gfdit.core.layouts import widest
from gfdit.core.policy.ranks import FreeRanks


@dataclass
class Static:
    """One request at a time, first in, first out, every task as wide as the whole machine allows.

    Serving with static parallelism, called Legacy in the GF-DiT paper (section 6.1): nothing else starts before
    the oldest request has finished, whatever its tasks leave idle. One that the ranks cannot run is passed over.
    """

    name = "static"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        oldest = next((r for r in view.requests.values() if widest(r.candidates, _num_able(r, view))), None)
        if oldest is None or oldest.running:
            return Decision()
        task = next(task for task in view.ready if task.request_id == oldest.id)
        spec = widest(view.cost.candidates(task), _num_able(oldest, view))
        layout = FreeRanks.of(view.ranks).take(spec, task.model, oldest.last_layout) if spec else None
        return Decision((Dispatch((task.id,), layout),) if layout else ())


def _num_able(request: RequestView, view: SchedulerView) -> int:
    return sum([request.model in rank.resident for rank in view.ranks])
