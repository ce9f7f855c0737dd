"""Planted bugs, nearly all in the control plane, each by a monkeypatch: the simulation must find every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.artifacts.views import FieldView
from gfdit.core.commands import ResetEdges
from gfdit.core.control import ControlPlane
from gfdit.core.control import state as state_module
from gfdit.core.control.checkpoints import Checkpoints
from gfdit.core.control.edges import EdgeResets
from gfdit.core.control.holders import Holders
from gfdit.core.control.records import DispatchRecord
from gfdit.core.control.state import ClusterState
from gfdit.core.layouts import ExecutionLayout
from tests.whole import workers, world

Plant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Plant] = {}


def mutant(plant: Plant) -> Plant:
    MUTANTS[plant.__name__.replace("_", "-")] = plant
    return plant


def _after(patch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[..., Any]) -> None:
    """``change(answer, self, *arguments)`` replaces what a method answers."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *a, **k: change(original(self, *a, **k), self, *a, **k))


@mutant
def edges_stay_broken_after_a_failed_collective(patch: pytest.MonkeyPatch) -> None:
    _after(patch, EdgeResets, "among", lambda command, *_, **__: replace(command, edges=()))


@mutant
def a_rank_that_joined_is_used_at_once(patch: pytest.MonkeyPatch) -> None:
    def join(self: ControlPlane, event: ev.RankJoined) -> bool:
        if event.rank in self.state.ranks.lost:
            self.state.ranks.restore(event.rank)
        return True

    patch.setattr(ControlPlane, "_on_rank_joined", join)


@mutant
def generations_are_counted_by_reset_not_by_edge(patch: pytest.MonkeyPatch) -> None:
    def same(command: ResetEdges, *_: Any, **__: Any) -> ResetEdges:
        return replace(command, edges=tuple((one, other, 1) for one, other, _ in command.edges))

    _after(patch, EdgeResets, "among", same)
    _after(patch, EdgeResets, "of", same)


@mutant
def one_rank_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    """A dispatch closes with its first report."""

    def report(self: ControlPlane, dispatch: DispatchRecord, rank: int) -> bool:
        open_yet = rank in dispatch.waiting_for
        dispatch.waiting_for.clear()
        return open_yet

    patch.setattr(ControlPlane, "_report", report)


@mutant
def a_lost_rank_still_holds_its_artifacts(patch: pytest.MonkeyPatch) -> None:
    def drop(self: ClusterState, rank_id: int) -> None:
        self.ranks.drop(rank_id)
        for dispatch in self.dispatches.values():
            if rank_id in dispatch.layout.ranks:
                dispatch.lost.add(rank_id)

    patch.setattr(ClusterState, "drop_rank", drop)


@mutant
def members_that_failed_hold_the_outputs_too(patch: pytest.MonkeyPatch) -> None:
    original = Holders.task_succeeded

    def succeeded(self: Holders, record: Any, task: Any, dispatch: DispatchRecord) -> Any:
        dispatch.finished.update(dispatch.members)
        return original(self, record, task, dispatch)

    patch.setattr(Holders, "task_succeeded", succeeded)


@mutant
def consumed_inputs_count_as_kept(patch: pytest.MonkeyPatch) -> None:
    """A member that finished has dropped its inputs; the task runs again as if it had not."""
    patch.setattr(Holders, "task_failed", lambda self, record, task, dispatch: None)


@mutant
def copies_arrive_whatever_happens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPlane, "_forget_unconfirmed", lambda self, dispatch: None)
    patch.setattr(ControlPlane, "_forget_copy", lambda self, migration, rank, layout: False)


@mutant
def an_input_is_not_brought(patch: pytest.MonkeyPatch) -> None:
    """Its last input is not brought to a layout."""
    _after(patch, Holders, "move_inputs", lambda moves, *_: moves[:-1])


@mutant
def artifacts_are_freed_one_reader_early(patch: pytest.MonkeyPatch) -> None:
    def greedy(self: Holders, task: Any, before: Any = ()) -> list[str]:
        artifacts = self._state.requests[task.request_id].artifacts
        return [name for name in task.inputs if artifacts[name].readers <= 2]

    patch.setattr(Holders, "last_reads", greedy)


@mutant
def strays_are_not_freed_after_a_fault(patch: pytest.MonkeyPatch) -> None:
    original = Holders._free

    def free(self: Holders, record: Any, name: str, dropped_by: set[int]) -> Any:
        record.has_strays = False
        return original(self, record, name, dropped_by)

    patch.setattr(Holders, "_free", free)


@mutant
def copies_to_fall_back_on_are_counted_on_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    original = Checkpoints.after

    def after(self: Checkpoints, dispatch: DispatchRecord, record: Any) -> Any:
        moves = original(self, dispatch, record)
        for move in moves:
            record.artifacts[move.artifact].kept[move.target.ranks[0]] = move.target
        return moves

    patch.setattr(Checkpoints, "after", after)


@mutant
def a_cancelled_request_ends_while_it_runs(patch: pytest.MonkeyPatch) -> None:
    def end(self: ControlPlane, record: Any, terminal: Any) -> None:
        record.ending = record.ending or terminal
        self.state.withdraw_ready(record)
        if freed := self.state.remove(record):
            self._commands.append(freed)
        self._commands.append(record.ending)

    patch.setattr(ControlPlane, "_end", end)


@mutant
def a_late_report_ends_a_request_twice(patch: pytest.MonkeyPatch) -> None:
    original = ControlPlane._on_cancelled

    def cancel(self: ControlPlane, event: ev.RequestCancelled) -> bool:
        if event.request_id not in self.state.requests and event.request_id != "nobody":
            self._commands.append(cmd.CancelRequest(event.request_id))
        return original(self, event)

    patch.setattr(ControlPlane, "_on_cancelled", cancel)


@mutant
def lost_artifacts_are_not_made_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterState, "lacking", lambda self: [])


@mutant
def retries_have_no_end(patch: pytest.MonkeyPatch) -> None:
    def retry(self: ControlPlane, record: Any, dispatch: DispatchRecord) -> None:
        if dispatch.caused_by_peer:
            self.state.recover(record)
        else:
            record.ending = cmd.FailRequest(record.request.id, str(dispatch.error), 500)

    patch.setattr(ControlPlane, "_retry_or_fail", retry)


@mutant
def a_rewound_request_forgets_its_readers(patch: pytest.MonkeyPatch) -> None:
    original = state_module.rewind

    def rewind(record: Any) -> list[Any]:
        before = {name: art.readers for name, art in record.artifacts.items()}
        withdrawn = original(record)
        for name, art in record.artifacts.items():
            art.readers = before[name]
        return withdrawn

    patch.setattr(state_module, "rewind", rewind)


@mutant
def a_sender_tells_parts_apart_by_their_shapes(patch: pytest.MonkeyPatch) -> None:
    """A bug of the workers: parts of equal shape are not always the same part."""

    def shape(spec: FieldView, layout: ExecutionLayout, rank: int) -> list[int]:
        return [end - begin for begin, end in spec.box(layout, rank)]

    def would_send(process: workers.Process, artifact: str, layout: ExecutionLayout) -> bool:
        if (part := process.store.get(artifact)) is None:
            return False
        rank, fields = process.rank, process.contents.view(artifact).fields
        return all(shape(spec, part.layout, rank) == shape(spec, layout, rank) for spec in fields)

    patch.setattr(world, "would_send", would_send)
