"""What a policy may ask about time. Implementations: :mod:`gfdit.core.cost.table`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gfdit.core.layouts import ExecutionLayout, ParallelSpec

if TYPE_CHECKING:
    from gfdit.core.policy import RequestView, TaskView


class CostModel(Protocol):
    """Estimated times in seconds. A model or task that is not known raises :class:`UnknownCostError`."""

    @property
    def version(self) -> int:
        """Another number once an answer may be another: as long as it stays, answers may be kept."""
        ...

    def task_s(self, task: TaskView, layout: ExecutionLayout, batch: int = 1) -> float:
        """Execution time of ``batch`` tasks like ``task`` in one step under ``layout``, without migration."""
        ...

    def remaining_s(self, request: RequestView, layout: ExecutionLayout) -> float:
        """Time to finish ``request`` if every denoising step left ran under ``layout.parallel``.

        Tasks that cannot take that specification run at the widest candidate not wider than it.
        """
        ...

    def candidates(self, task: TaskView) -> tuple[ParallelSpec, ...]:
        """The feasible specifications of ``task``, narrowest first."""
        ...

    def migration_s(self, task: TaskView, layout: ExecutionLayout) -> float:
        """Time until every rank of ``layout`` holds the inputs of ``task``; 0 if all do already."""
        ...

    def observe(self, task: TaskView, layout: ExecutionLayout, seconds: float, batch: int = 1) -> None:
        """Take the measured execution time of one step into account."""
        ...


class UnknownCostError(LookupError):
    """The cost model has no entry for a model or task. The message names what is known.

    ``request_id`` is the request asked about: the control plane fails that one and no other.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
