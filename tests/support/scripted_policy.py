"""A policy that replays written layouts, for tests: `tests/support/scripted_policy.py:Scripted`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gfdit.core import Decision, Dispatch, ExecutionLayout, ParallelSpec, SchedulerView, TaskKind, TaskView


@dataclass
class Scripted:
    """Denoising step ``i`` runs on entry ``i`` of ``layouts``, and again from the first when they run out.

    ``layouts`` separates layouts by spaces: ``SPEC@RANKS`` with SPEC ``spN`` or ``cfg2xspN`` and RANKS
    ordered and separated by commas, as in ``"sp1@0 sp2@1,0 sp4@3,1,0,2 cfg2xsp1@0,2"``. Encode, prepare and
    decode run on the rank given for each. For the k-th request to be seen (from 0) each rank ``r`` becomes
    ``(r + k * per_request) % number of ranks``.

    A task waits until all its ranks are free, and no later task takes them meanwhile. ``order`` says who goes
    first: with ``fewest-steps`` requests on the same ranks take turns step by step, with ``arrival`` the
    oldest runs to its end.
    """

    layouts: str = "sp1@0"
    encode_rank: int = 0
    prepare_rank: int = 0
    decode_rank: int = 0
    per_request: int = 0
    order: Literal["fewest-steps", "arrival"] = "fewest-steps"
    name = "scripted"
    run_ahead = True
    _steps: tuple[ExecutionLayout, ...] = field(init=False, repr=False)
    _index: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _num_seen: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = tuple(map(parse_layout, self.layouts.split()))
        if not self._steps:
            raise ValueError("layouts needs at least one layout, like sp2@1,0")

    def schedule(self, view: SchedulerView) -> Decision:
        self._index = {name: index for name, index in self._index.items() if name in view.requests}
        for name in view.requests:
            if name not in self._index:
                self._index[name] = self._num_seen
                self._num_seen += 1
        ready = view.ready
        if self.order == "fewest-steps":
            ready = tuple(sorted(ready, key=lambda task: view.requests[task.request_id].steps_done))
        free, dispatches = set(view.free_ranks), []
        for task in ready:
            layout = self._layout(task, len(view.ranks))
            if free.issuperset(layout.ranks):
                dispatches.append(Dispatch((task.id,), layout))
            free.difference_update(layout.ranks)
        return Decision(tuple(dispatches))

    def _layout(self, task: TaskView, num_ranks: int) -> ExecutionLayout:
        layout = {
            TaskKind.ENCODE: ExecutionLayout((self.encode_rank,)),
            TaskKind.PREPARE: ExecutionLayout((self.prepare_rank,)),
            TaskKind.DENOISE: self._steps[task.step_index % len(self._steps)],
            TaskKind.DECODE: ExecutionLayout((self.decode_rank,)),
        }[task.kind]
        shift = self._index[task.request_id] * self.per_request
        ranks = layout.ranks
        if shift:
            ranks = tuple((rank + shift) % num_ranks for rank in ranks)
        return ExecutionLayout(ranks, layout.parallel)


def parse_layout(text: str) -> ExecutionLayout:
    """``cfg2xsp1@0,2`` as a layout; the reverse of ``str(layout)``."""
    try:
        spec, _, ranks = text.partition("@")
        cfg, _, sp = spec.rpartition("x")
        if not sp.startswith("sp") or (cfg and not cfg.startswith("cfg")):
            raise ValueError
        parallel = ParallelSpec(sp=int(sp[2:]), cfg=int(cfg[3:]) if cfg else 1)
        layout = ExecutionLayout(tuple(int(rank) for rank in ranks.split(",")), parallel)
    except ValueError:
        raise ValueError(f"layout {text!r} is not like sp2@1,0 or cfg2xsp1@0,2") from None
    if parallel.size != len(layout.ranks):
        raise ValueError(f"layout {text!r} needs {parallel.size} ranks, got {len(layout.ranks)}")
    return layout
