"""Several policies on the same traces, in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gfdit.core import Policy
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.policy.loading import load_policy
from gfdit.observe.timeline import Span, TimelineWriter, read_timeline
from gfdit.sim.bounds.work import narrowest_rank_s
from gfdit.sim.fleet import Fleet, FleetOptions
from gfdit.sim.graphs import GraphBuilder
from gfdit.sim.options import SimulationOptions
from gfdit.sim.results import summarize
from gfdit.sim.simulator import SimulatedRequest, SimulationRun, Simulator, Status
from gfdit.sim.trace import TraceRequest
from gfdit.sim.workflow_source import WorkflowSource

HANG_S = 10.0
NAMED = 5  # requests named in a complaint; more are counted

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy and its arguments as on the command line; ``name`` is what tables and pictures call it."""

    spec: str
    args: tuple[tuple[str, str], ...] = ()
    name: str = ""
    admission: str = "none"

    @property
    def label(self) -> str:
        said = (*self.args, *([] if self.admission == "none" else [("admission", self.admission)]))
        return self.name or " ".join([self.spec, *(f"{key}={value}" for key, value in said)])

    def load(self) -> Policy:
        """Raises ``ValueError`` as ``load_policy`` does."""
        return load_policy(self.spec, dict(self.args), self.admission)


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation, in a form that can go to another process. Of ``workflows`` requests name one.

    With a ``fleet``, ``options`` are of each of its servers, but for the first, which have ``others``.
    """

    policy: PolicyChoice
    trace: tuple[TraceRequest, ...]
    table: CostTable
    options: SimulationOptions
    grace_s: float = 0.0
    workflows: WorkflowSource | None = None
    fleet: FleetOptions | None = None
    others: tuple[SimulationOptions, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result file's content, and what went wrong in one line; empty if nothing did."""

    result: dict[str, Any]
    complaint: str = ""


def simulate(job: Job, timeline: Path | None = None) -> Outcome:
    """Raises ``ValueError`` for a policy that cannot be loaded or a trace that cannot be served."""
    if job.fleet is not None:
        fleet = Fleet(job.policy.load, job.table, job.trace, job.options, job.fleet, job.others)
        with _told_where_it_hangs(fleet, job.policy.label):
            done = fleet.run()
        return Outcome(
            summarize(done, grace_s=job.grace_s, narrowest_rank_s=_narrowest_rank_s(job)), _complaint(done)
        )
    graphs = None if job.workflows is None else job.workflows.graphs(job.options.num_ranks)
    simulator = Simulator(job.policy.load(), job.table, job.trace, job.options, graphs)
    with _told_where_it_hangs(simulator, job.policy.label):
        if timeline is None:
            done = simulator.run()
        else:
            with TimelineWriter(timeline, job.options.num_ranks, base_s=0.0) as writer:
                done = simulator.run(writer)
    return _outcome(job, done)


def _outcome(job: Job, done: SimulationRun) -> Outcome:
    return Outcome(summarize(done, grace_s=job.grace_s, narrowest_rank_s=_narrowest_rank_s(job)), _complaint(done))


@contextmanager
def _told_where_it_hangs(simulator: Simulator | Fleet, policy: str) -> Iterator[None]:
    """A line on stderr, once, if nothing happens for :data:`HANG_S` seconds: a policy that loops has no end."""
    ended, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        seen = -1
        while not ended.wait(HANG_S):
            if simulator.num_happened == seen:
                stack = traceback.extract_stack(sys._current_frames().get(thread))
                asked = next((index for index, frame in enumerate(stack) if frame.name == "schedule"), -1)
                frame = [frame for frame in stack[asked:] if frame.filename == stack[asked].filename][-1]
                print(
                    f"policy {policy!r} has not answered for {HANG_S:g} s, at {simulator.now_s:.3f} s of the "
                    f"trace; it is at {frame.filename}:{frame.lineno}",
                    file=sys.stderr,
                    flush=True,
                )
                return
            seen = simulator.num_happened

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _narrowest_rank_s(job: Job) -> dict[str, float] | None:
    """None where a trace does not say how long tasks take: of workflows, edits under masks, rounded steps."""
    if job.workflows is not None or job.options.edits is not None or job.options.steps_per_task > 1:
        return None
    cost = TableCostModel(job.table)
    return narrowest_rank_s(job.trace, cost, GraphBuilder(cost, job.options.num_ranks))


def simulate_spans(job: Job) -> tuple[Outcome, list[Span]]:
    """With what ran where; migrations included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        outcome = simulate(job, path)
        return outcome, read_timeline(path)


def in_processes(
    call: Callable[[T], R],
    items: Sequence[T],
    *,
    num_processes: int,
    on_done: Callable[[], object] = lambda: None,
) -> list[R]:
    """``call`` of every item, in their order; the first error ends it. ``on_done`` is told of each one.

    Processes are spawned, so ``call`` must be a function of a module. One process is this one.
    """
    if num_processes <= 1 or len(items) <= 1:
        return list(_one_by_one(call, items, on_done))
    spawning = multiprocessing.get_context("spawn")
    # Ctrl-C is for this process to tell of: the others end without a word.
    own = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(min(num_processes, len(items)), spawning, signal.signal, own) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
                on_done()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _one_by_one(call: Callable[[T], R], items: Iterable[T], on_done: Callable[[], object]) -> Iterable[R]:
    for item in items:
        yield call(item)
        on_done()


def _complaint(done: SimulationRun) -> str:
    starved = [request for request in done.requests if request.status is Status.STARVED]
    failed = [request for request in done.requests if request.status is Status.FAILED]
    parts = []
    if starved:
        parts.append(f"starvation: policy {done.policy!r} never finished {_names(starved, done)}")
    if failed:
        parts.append(f"failed: {_names(failed, done)}: {failed[0].detail}")
    elif done.faults:
        parts.append(f"faults of the policy: {len(done.faults)}, the first: {done.faults[0]}")
    return "; ".join(parts)


def _names(requests: Sequence[SimulatedRequest], done: SimulationRun) -> str:
    names = [request.trace.id for request in requests[:NAMED]]
    if len(requests) > NAMED:
        names.append(f"{len(requests) - NAMED} more")
    return f"{len(requests)} of {len(done.requests)} requests ({', '.join(names)})"
