"""``AdapterKit``: runs requests task by task where a script says, and the same requests on the stock pipeline."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfdit.adapters.forward.verdict import Verdicts
from gfdit.adapters.testing.conductor import Conductor, call_all
from gfdit.adapters.testing.flow import Flow
from gfdit.adapters.testing.messages import How, Prepared
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.processes import Child, ForkServer
from gfdit.adapters.testing.requests import KitRequest
from gfdit.comm import create_heap
from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import TaskKind, artifact_kind

_SERVICES = "gfdit.adapters.testing.services"
# Several requests of each signature, on a machine that does something else as well.
_SELF_TEST_S = 3600.0


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

    ``adapter`` is ``module:Class`` instead of gfdit's; ``od_config`` are further fields of
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
        self._conductor = Conductor(self._ranks)
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
            outputs.append(call_all(children, "generate", payload)[0])
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
            done = self._conductor.dispatch(members)
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
            self._conductor.dispatch([flow])
            for name in made:
                self._conductor.round_trip(flow, name)
        return flow.output(), flow.faults

    def host_waits(self, request: KitRequest, script: str) -> list[str]:
        """Where a denoising step of ``request`` would make the host wait for a GPU, a line for each place.

        Of a request whose like was served before, and on rank 0, which has to be the first in each of ``script``'s
        layouts. What has come from another rank is taken for something on the host, and so are small tensors of
        artifacts once a layout has several ranks: there only waits in gfdit's own code tell something.
        """
        for _ in range(2):
            flow = self._flow(request, script, How(waits=True))
            while not flow.is_over:
                self._conductor.dispatch([flow])
        return list(
            dict.fromkeys(found for fault in flow.faults if (found := fault.removeprefix("rank 0: ")) != fault)
        )

    def artifact_bytes(self, request: KitRequest) -> dict[str, dict[str, tuple[int, int]]]:
        """By task kind, and by kind of artifact that is alive after it: bytes of tensors and of metadata."""
        flow = self._flow(request, "sp1@0")
        sizes: dict[str, dict[str, tuple[int, int]]] = {}
        while not flow.is_over:
            kind = str(flow.next.kind)
            self._conductor.dispatch([flow])
            sizes[kind] = {
                artifact_kind(flow.request_id, name): self._ranks[0].call("sizes", name) for name in flow.holders
            }
        return sizes

    # Ranks

    def self_test(self, request: KitRequest | None = None, size: int = 64) -> Verdicts:
        """What a server learns of the model when it starts; requests are cut by it from then on.

        Of ``request`` alone, if given, and of those like it.
        """
        if request is None:
            pairs = self._engine.call("self_test_pairs", size)
        else:
            pairs = [self._engine.call("pair_like", request)]
        verdicts = self._ranks[0].call("self_test", pairs, timeout_s=_SELF_TEST_S)
        self._engine.call("use_verdicts", verdicts)
        for child in self._ranks:
            child.call("apply", _use_verdicts, (verdicts,))
        return verdicts

    def use_adapter(self, path: str | None) -> None:
        """Drive the loaded pipeline by the adapter at ``module:Class`` from now on; None: its own."""
        call_all(self._ranks, "use_adapter", path)
        self.adapter = path

    def on_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(executor, *args)`` on every rank, values by rank. For sabotage; pickled by reference."""
        return call_all(self._ranks, "apply", fn, args)

    def held(self) -> list[list[str]]:
        """Ids of the artifacts that each rank holds; none between runs."""
        return call_all(self._ranks, "held")

    # Requests

    def _prepare(self, request: KitRequest) -> Prepared:
        return self._engine.call("prepare", request, f"r{next(self._ids)}", self.adapter, self._loaded)

    def _flow(self, request: KitRequest, script: str, how: How = How()) -> Flow:  # noqa: B008 - immutable
        prepared = self._prepare(request)
        flow = Flow(prepared, script, list(prepared.graph.tasks), how)
        if script:
            flow.check(self.num_ranks)
        return flow

    def _finish(self, flows: list[Flow]) -> list[Output]:
        while alive := [flow for flow in flows if not flow.is_over]:
            for flow in alive:
                self._conductor.dispatch([flow])
        return [flow.output() for flow in flows]

    def _until_denoise(self, flows: list[Flow]) -> None:
        for flow in flows:
            while flow.next.kind in (TaskKind.ENCODE, TaskKind.PREPARE):
                self._conductor.dispatch([flow])


def _use_verdicts(executor: Any, verdicts: Verdicts) -> None:
    executor.gfdit_use_verdicts(verdicts)


@dataclass(frozen=True)
class _Service:
    """A class of the services module, found in the process where it is to live."""

    name: str

    def __call__(self, *args: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(_SERVICES), self.name)(*args)


def _listed(requests: KitRequest | Sequence[KitRequest]) -> Sequence[KitRequest]:
    return [requests] if isinstance(requests, KitRequest) else requests
