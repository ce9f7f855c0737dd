"""What the kit has of a control plane: runs tasks on ranks, and brings artifacts where they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gfdit.adapters.testing.flow import Flow
from gfdit.adapters.testing.messages import TaskRun
from gfdit.adapters.testing.processes import Child, ChildError
from gfdit.core.artifacts.transfers import plan_transfers
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout

if TYPE_CHECKING:
    from gfdit.adapters.testing.fingerprint import Fingerprint


class Conductor:
    """Of ``children``, a worker process for each rank. After a failure nothing is left of any request."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._ids = itertools.count(1)
        self._generation = 0

    def dispatch(self, flows: list[Flow]) -> TaskRun:
        """Run the next task of each flow as one, on the layout of the first; returns the first rank's word."""
        try:
            return self._run_next(flows)
        except BaseException:
            self._recover()
            raise

    def _run_next(self, flows: list[Flow]) -> TaskRun:
        layout = flows[0].layout
        tasks = tuple(flow.next for flow in flows)
        for flow in flows:
            for name in flow.next.inputs:
                self._bring(flow, name, layout)
        payloads = {flow.request_id: flow.prepared.payload for flow in flows if not flow.next.inputs}
        members = [self._children[rank] for rank in layout.ranks]
        runs: list[TaskRun] = call_all(members, "run", tasks, layout, payloads, flows[0].how)
        views = dict(runs[0].views)
        for flow in flows:
            for rank, run in zip(layout.ranks, runs, strict=True):
                flow.faults += [f"rank {rank}: {fault}" for fault in run.faults]
            flow.done(layout, views, runs[0])
            self._drop(flow, flow.unread())
        return runs[0]

    def _bring(self, flow: Flow, name: str, target: ExecutionLayout) -> None:
        holders, view = flow.holders[name], flow.views[name]
        if view.fits(holders, target):
            return
        plan = plan_transfers(view, holders, target)
        held = tuple((rank, holders[rank]) for rank in plan.ranks if rank in holders)
        move = Migrate(next(self._ids), flow.request_id, name, plan.ranks, plan.transfers, target, held, view)
        call_all([self._children[rank] for rank in plan.ranks], "move", move)
        holders.update(dict.fromkeys(target.ranks, target))

    def _drop(self, flow: Flow, names: list[str]) -> None:
        for name in names:
            call_all([self._children[rank] for rank in flow.holders.pop(name)], "free", (name,))

    def round_trip(self, flow: Flow, name: str) -> None:
        """Send an artifact to the next rank, drop it at home, and bring it back."""
        (home, layout), *others = flow.holders[name].items()
        if others or len(self._children) == 1:
            return
        away = (home + 1) % len(self._children)
        prints: list[Fingerprint] = [self._children[home].call("fingerprint", name)]
        for origin, place in ((home, away), (away, home)):
            self._bring(flow, name, ExecutionLayout((place,)))
            prints.append(self._children[place].call("fingerprint", name))
            self._children[origin].call("free", (name,))
            del flow.holders[name][origin]
        flow.holders[name] = {home: layout}
        for where, seen in zip(("another rank", "its way back"), prints[1:], strict=True):
            if paths := [path for path in prints[0].keys() | seen.keys() if prints[0].get(path) != seen.get(path)]:
                flow.faults.append(f"{name} is not the same on {where}, at: {', '.join(sorted(paths)[:5])}")

    def _recover(self) -> None:
        """After a failure: no artifacts, and edges as new."""
        self._generation += 1
        for rank in self._children:
            try:
                rank.call("reset", self._generation)
                rank.call("free", tuple(rank.call("held")))
            except ChildError:
                return  # a rank has ended: every later call says so


def call_all(children: Sequence[Child], method: str, *args: Any) -> list[Any]:
    """Begin a call everywhere, then wait for all of it. Raises the first error that is no consequence."""
    for child in children:
        child.post(method, *args)
    values, errors = [], []
    for child in children:
        try:
            values.append(child.collect())
        except ChildError as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: "CommAborted" in str(error))
    return values
