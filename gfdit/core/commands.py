"""What the control plane asks of its driver. Order matters: a driver emits commands in the order given.

They go to workers and engine as they are.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gfdit.core.artifacts.transfers import Transfer
from gfdit.core.artifacts.views import UNKNOWN, ArtifactView
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.tasks import Task

Lane = Literal["compute", "migration"]
"""The two queues of a rank, each with edges of its own."""


class _Command(Struct, frozen=True, gc=False, tag=True):
    """Tagged with its name, by which it is told apart on the wire and in a recording."""


class Migrate(_Command, frozen=True, gc=False):
    """Bring an artifact to the ranks of ``target``, each its part of it, on the migration lane.

    ``ranks``, sources first, take part; each runs its ``transfers`` in the order given. ``held`` says under which
    layout those that hold some of the artifact do. ``view`` is what it consists of. With ``keep`` it is a copy to
    fall back on: no task waits for it, and its source may have dropped the artifact before.

    With ``streamed``, the dispatch that makes the artifact at the time, the first of ``ranks`` sends each part of
    it to the others as soon as it is there, for a task that reads it on its way: it is theirs for that task alone.
    """

    migration_id: int
    request_id: str
    artifact: str
    ranks: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    target: ExecutionLayout
    held: tuple[tuple[int, ExecutionLayout], ...] = ()
    view: ArtifactView = UNKNOWN
    keep: bool = False
    streamed: int = 0

    @property
    def num_copies(self) -> int:
        """How often something goes to a rank."""
        return sum([len(transfer.destinations) for transfer in self.transfers])


class RunTask(_Command, frozen=True, gc=False):
    """Run ``tasks`` (several: one batched step) on every rank of ``layout``.

    A rank first waits for the ``migrations`` it takes part in, which were emitted before; it drops the
    artifacts in ``consumes`` once the task has run: no later task reads them. A rank that fails keeps them as they
    were, since the task may run again. The first rank of the layout hands the result of a request on.

    With ``after``, the dispatch that runs on these ranks now, the task is queued behind it: a rank goes on to it
    without a word from the control plane, unless ``after`` failed there or the task was withdrawn. The ranks
    must agree on that (see :class:`WithdrawTask`).
    """

    dispatch_id: int
    tasks: tuple[Task, ...]
    layout: ExecutionLayout
    migrations: tuple[Migrate, ...] = ()
    consumes: tuple[str, ...] = ()
    after: int | None = None


class WithdrawTask(_Command, frozen=True, gc=False):
    """Take a queued task back, unless a rank has begun it: then it runs on all of them.

    The first claim decides, of a rank to begin it or of this command, and it decides for every rank: a group of
    which some run a task and others skip it would wait for ever. The driver answers with
    :class:`~events.TaskWithdrawn` if no rank will run it, and with nothing if it came too late.
    """

    dispatch_id: int


class FreeArtifacts(_Command, frozen=True, gc=False):
    """Drop these artifacts on these ranks; an unknown one is no error.

    One that a task or copy with a number above ``before`` makes stays: it was made again since.
    """

    ranks: tuple[int, ...]
    artifacts: tuple[str, ...]
    before: int


class ResetEdges(_Command, frozen=True, gc=False):
    """Return edges among ``ranks`` to a fresh state: after a failed collective, or for a rank that has joined.

    ``edges`` are (rank, peer, generation) with rank < peer. Every rank resets those it is an end of when it gets
    there in its ``lane``; it has then left every operation on them.
    """

    reset_id: int
    lane: Lane
    ranks: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]


class ProbeRank(_Command, frozen=True, gc=False):
    """A task has failed on ``rank``: find out whether it can still do its work (:class:`~events.RankProbed`)."""

    probe_id: int
    rank: int


class LoadComponent(_Command, frozen=True, gc=False):
    """Have ``rank`` drop ``evict`` and load ``component``: nothing else runs there until it has answered.

    The answer is :class:`~events.ComponentLoaded`.
    """

    load_id: int
    rank: int
    component: str
    evict: tuple[str, ...] = ()


class RestartRank(_Command, frozen=True, gc=False):
    """Replace the process of ``rank``, which fails; :class:`~events.RankLost` follows.

    ``for_good``: do not replace it.
    """

    rank: int
    reason: str
    for_good: bool = False


class StartRequest(_Command, frozen=True, gc=False):
    """The first task of a request has been dispatched: it has left the queue."""

    request_id: str
    queue_wait_s: float


class CompleteRequest(_Command, frozen=True, gc=False):
    request_id: str


class CancelRequest(_Command, frozen=True, gc=False):
    """A cancelled request holds nothing any more."""

    request_id: str


class RejectRequest(_Command, frozen=True, gc=False):
    """Admission refused the request (HTTP 429)."""

    request_id: str
    reason: str
    retry_after_s: float | None = None


class FailRequest(_Command, frozen=True, gc=False):
    """``waited``: no rank was free for it for as long as it may wait."""

    request_id: str
    error: str
    status_code: int = 500
    waited: bool = False


class ReportFault(_Command, frozen=True, gc=False):
    """A policy raised, broke a rule or left ready tasks idle; scheduling goes on."""

    message: str


class WakeAt(_Command, frozen=True, gc=False):
    """Send a :class:`~events.WakeUp` at this time; replaces an earlier one."""

    at_s: float


Command = (
    Migrate
    | RunTask
    | WithdrawTask
    | FreeArtifacts
    | ResetEdges
    | ProbeRank
    | LoadComponent
    | RestartRank
    | StartRequest
    | CompleteRequest
    | CancelRequest
    | RejectRequest
    | FailRequest
    | ReportFault
    | WakeAt
)
