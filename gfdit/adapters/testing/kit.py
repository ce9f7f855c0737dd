"""``AdapterKit``: runs requests task by task where a script says, and the same requests on the stock pipeline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfdit.adapters.testing.messages import How, Prepared, TaskRun
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.processes import Child, ChildError, ForkServer
from gfdit.adapters.testing.requests import KitRequest
from gfdit.comm import create_heap
from gfdit.core.artifact_views import UNKNOWN, ArtifactView
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.tasks import Task, TaskKind, artifact_kind
from gfdit.core.transfers import plan_transfers
from gfdit.policies.layout_script import layout_of

if TYPE_CHECKING:
    from gfdit.adapters.testing.fingerprint import Fingerprint

_SERVICES = "gfdit.adapters.testing.services"


@dataclass(frozen=True)
class Batched:
    """Several requests whose denoising steps were dispatched together.

    ``requests_per_forward`` has a number per step that several had; ``split_reasons`` say why it is not theirs.
    """

    outputs: list[Output]
    requests_per_forward: tuple[float, ...]
    split_reasons: tuple[str, ...]


class AdapterKit:
    """``num_ranks`` worker processes on a CPU with the model at ``model_dir``, and stock ones on demand.

    ``adapter`` is ``module:Class`` instead of the pipeline's own; ``od_config`` are further fields of
    ``OmniDiffusionConfig``, for gfdit and stock alike. With ``ring`` any sequence-parallel degree works, as with
    the setting of that name. ``fork_server`` may be shared among kits.
    A failure in a process is a :class:`ChildError` with its traceback; the kit can be used on after it.
    Requests that the adapter refuses raise it too.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        num_ranks: int = 4,
        dtype: str = "float32",
        adapter: str | None = None,
        od_config: dict[str, Any] | None = None,
        *,
        ring: bool = False,
        fork_server: ForkServer | None = None,
        comm_timeout_s: float = 30.0,
    ) -> None:
        if not Path(model_dir).is_dir():
            raise ValueError(f"{model_dir} is not a folder with a model")
        self.num_ranks = num_ranks
        self.dtype = dtype
        self.adapter = adapter
        self._ring = ring
        self._ids = itertools.count(1)
        self._generation = 0
        self._stock: dict[tuple[tuple[str, int], ...], list[Child]] = {}
        self._closing = ExitStack()
        try:
            self._server = fork_server or self._closing.enter_context(ForkServer())
            self._start(str(model_dir), dtype, od_config or {}, comm_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, model_dir: str, dtype: str, od_config: dict[str, Any], comm_timeout_s: float) -> None:
        self._engine = self._server.start(
            "engine", _Service("EngineService"), model_dir, dtype, od_config, self.num_ranks, self._ring
        )
        self._closing.callback(self._engine.close)
        heap = create_heap("shared_memory", self.num_ranks).held_open()
        self._closing.callback(heap.unlink)
        config = self._engine.call("elastic_config")
        self._ranks: list[Child] = []
        for rank in range(self.num_ranks):
            args = (rank, heap, config, self.num_ranks, self.adapter, self._ring, comm_timeout_s)
            self._ranks.append(self._server.start(f"rank {rank}", _Service("RankService"), *args))
            self._closing.callback(self._ranks[-1].close)
        for child in self._ranks:
            child.wait_ready()
        self._loaded = self._ranks[0].call("describe")

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> AdapterKit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # What it says

    def candidates(self, request: KitRequest) -> tuple[ParallelSpec, ...]:
        """The specifications that a denoising step of ``request`` can take, narrowest first."""
        return self._flow(request, "").step_candidates

    def has_prepare(self, request: KitRequest) -> bool:
        return any(task.kind is TaskKind.PREPARE for task in self._flow(request, "").tasks)

    # References

    def stock(self, requests: KitRequest | Sequence[KitRequest], **degrees: int) -> list[Output]:
        """What the unmodified pipeline makes of each request, whole and one after the other.

        With degrees of vLLM-Omni's ``DiffusionParallelConfig`` (``ulysses_degree=2``) on that many stock ranks,
        which talk over gloo.
        """
        children = self._stock_ranks(degrees)
        outputs = []
        for request in _listed(requests):
            payload = self._prepare(request).payload
            outputs.append(self._all(children, "generate", payload)[0])
        return outputs

    def stock_splits_tokens(self) -> bool:
        """Whether vLLM-Omni has a plan to split this model's tokens; without one, its degrees mean nothing."""
        return self._stock_ranks({})[0].call("splits_tokens")

    def _stock_ranks(self, degrees: dict[str, int]) -> list[Child]:
        key = tuple(sorted(degrees.items()))
        if key not in self._stock:
            config, num_ranks = self._engine.call("stock_config", degrees)
            children = [
                self._server.start(f"stock rank {rank}", _Service("StockService"), rank, config)
                for rank in range(num_ranks)
            ]
            for child in children:
                self._closing.callback(child.close)
            for child in children:
                child.wait_ready()
            self._stock[key] = children
        return self._stock[key]

    # Runs

    def run(self, request: KitRequest, script: str, *, fresh: bool = False) -> Output:
        """The request alone, each task on the layout that ``script`` names.

        With ``fresh`` every task finds the pipeline as it was loaded, as on a rank that has never seen a request.
        """
        return self._finish([self._flow(request, script, How(fresh=fresh))])[0]

    def run_interleaved(self, pairs: Sequence[tuple[KitRequest, str]]) -> list[Output]:
        """The requests in turns, one task each."""
        return self._finish([self._flow(request, script) for request, script in pairs])

    def run_batched(self, requests: Sequence[KitRequest], script: str, *, alone: Output | None = None) -> Batched:
        """Step ``i`` of all requests that have one in one dispatch, on the script's layout for it.

        Calls of the transformer are counted against those of the first request ``alone``, which runs if not given.
        """
        alone = alone or self.run(requests[0], script)
        flows = [self._flow(request, script) for request in requests]
        self._until_denoise(flows)
        per_forward: list[float] = []
        reasons: dict[str, None] = {}
        while members := [flow for flow in flows if flow.next.kind is TaskKind.DENOISE]:
            step = members[0].next.step_index
            done = self._dispatch(members)
            reasons.update(dict.fromkeys(done.split_reasons))
            if len(members) > 1 and done.num_forwards:
                expected = alone.forwards[min(step, len(alone.forwards) - 1)]
                per_forward.append(len(members) * expected / done.num_forwards)
        return Batched(self._finish(flows), tuple(per_forward), tuple(reasons))

    def audit(self, request: KitRequest, script: str) -> tuple[Output, list[str]]:
        """Run with every task done twice and every artifact sent to another rank and back.

        Returns what came out, and a line for each input that a task changed, each task that did not do the same
        again, and each artifact that did not come back as it was. Only artifacts made by a single rank are sent.
        """
        flow = self._flow(request, script, How(audit=True))
        while not flow.is_over:
            made = flow.next.outputs
            self._dispatch([flow])
            for name in made:
                self._round_trip(flow, name)
        return flow.output(), flow.faults

    def artifact_bytes(self, request: KitRequest) -> dict[str, dict[str, tuple[int, int]]]:
        """By task kind, and by kind of artifact that is alive after it: bytes of tensors and of metadata."""
        flow = self._flow(request, "sp1@0")
        sizes: dict[str, dict[str, tuple[int, int]]] = {}
        while not flow.is_over:
            kind = str(flow.next.kind)
            self._dispatch([flow])
            sizes[kind] = {
                artifact_kind(flow.request_id, name): self._ranks[0].call("sizes", name) for name in flow.holders
            }
        return sizes

    # Ranks

    def use_adapter(self, path: str | None) -> None:
        """Drive the loaded pipeline by the adapter at ``module:Class`` from now on; None: its own."""
        self._all(self._ranks, "use_adapter", path)
        self.adapter = path

    def on_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(executor, *args)`` on every rank, values by rank. For sabotage; pickled by reference."""
        return self._all(self._ranks, "apply", fn, args)

    def held(self) -> list[list[str]]:
        """Ids of the artifacts that each rank holds; none between runs."""
        return self._all(self._ranks, "held")

    # The control plane's part

    def _prepare(self, request: KitRequest) -> Prepared:
        return self._engine.call("prepare", request, f"r{next(self._ids)}", self.adapter, self._loaded)

    def _flow(self, request: KitRequest, script: str, how: How = How()) -> _Flow:  # noqa: B008 - immutable
        prepared = self._prepare(request)
        flow = _Flow(prepared, script, list(prepared.graph.tasks), how)
        if script:
            flow.check(self.num_ranks)
        return flow

    def _finish(self, flows: list[_Flow]) -> list[Output]:
        while alive := [flow for flow in flows if not flow.is_over]:
            for flow in alive:
                self._dispatch([flow])
        return [flow.output() for flow in flows]

    def _until_denoise(self, flows: list[_Flow]) -> None:
        for flow in flows:
            while flow.next.kind in (TaskKind.ENCODE, TaskKind.PREPARE):
                self._dispatch([flow])

    def _dispatch(self, flows: list[_Flow]) -> TaskRun:
        """Run the next task of each flow as one, on the layout of the first; returns the first rank's word."""
        try:
            return self._run_next(flows)
        except BaseException:
            self._recover()
            raise

    def _run_next(self, flows: list[_Flow]) -> TaskRun:
        layout = flows[0].layout
        tasks = tuple(flow.next for flow in flows)
        for flow in flows:
            for name in flow.next.inputs:
                self._bring(flow, name, layout)
        payloads = {flow.request_id: flow.prepared.payload for flow in flows if not flow.next.inputs}
        members = [self._ranks[rank] for rank in layout.ranks]
        runs: list[TaskRun] = self._all(members, "run", tasks, layout, payloads, flows[0].how)
        views = dict(runs[0].views)
        for flow in flows:
            for rank, run in zip(layout.ranks, runs, strict=True):
                flow.faults += [f"rank {rank}: {fault}" for fault in run.faults]
            flow.done(layout, views, runs[0])
            self._drop(flow, flow.unread())
        return runs[0]

    def _bring(self, flow: _Flow, name: str, target: ExecutionLayout) -> None:
        holders, view = flow.holders[name], flow.views[name]
        if view.fits(holders, target):
            return
        plan = plan_transfers(view, holders, target)
        held = tuple((rank, holders[rank]) for rank in plan.ranks if rank in holders)
        move = Migrate(next(self._ids), flow.request_id, name, plan.ranks, plan.transfers, target, held, view)
        self._all([self._ranks[rank] for rank in plan.ranks], "move", move)
        holders.update(dict.fromkeys(target.ranks, target))

    def _drop(self, flow: _Flow, names: list[str]) -> None:
        for name in names:
            self._all([self._ranks[rank] for rank in flow.holders.pop(name)], "free", (name,))

    def _round_trip(self, flow: _Flow, name: str) -> None:
        """Send an artifact to the next rank, drop it at home, and bring it back."""
        (home, layout), *others = flow.holders[name].items()
        if others or self.num_ranks == 1:
            return
        away = (home + 1) % self.num_ranks
        prints: list[Fingerprint] = [self._ranks[home].call("fingerprint", name)]
        for origin, place in ((home, away), (away, home)):
            self._bring(flow, name, ExecutionLayout((place,)))
            prints.append(self._ranks[place].call("fingerprint", name))
            self._ranks[origin].call("free", (name,))
            del flow.holders[name][origin]
        flow.holders[name] = {home: layout}
        for where, seen in zip(("another rank", "its way back"), prints[1:], strict=True):
            if paths := [path for path in prints[0].keys() | seen.keys() if prints[0].get(path) != seen.get(path)]:
                flow.faults.append(f"{name} is not the same on {where}, at: {', '.join(sorted(paths)[:5])}")

    def _recover(self) -> None:
        """After a failure: no artifacts, and edges as new."""
        self._generation += 1
        for rank in self._ranks:
            try:
                rank.call("reset", self._generation)
                rank.call("free", tuple(rank.call("held")))
            except ChildError:
                return  # a rank has ended: every later call says so

    @staticmethod
    def _all(children: Sequence[Child], method: str, *args: Any) -> list[Any]:
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


@dataclass
class _Flow:
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


@dataclass(frozen=True)
class _Service:
    """A class of the services module, found in the process where it is to live."""

    name: str

    def __call__(self, *args: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(_SERVICES), self.name)(*args)


def _listed(requests: KitRequest | Sequence[KitRequest]) -> Sequence[KitRequest]:
    return [requests] if isinstance(requests, KitRequest) else requests
