"""Latent and guidance parallelism: on how many ranks a step may run (paper, section 5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core.layouts import ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.workflow.recording import WorkflowError
from gfdit.workflow.rewriting import Rewriting


@dataclass(frozen=True)
class Split:
    """Steps of ``model``, by default of all: latents in up to ``sp`` parts; ``cfg``: a rank for either branch.

    Of what the model can: the scheduler chooses among that at every step.
    """

    sp: int = 1
    cfg: bool = False
    model: str | None = None

    def apply(self, rewriting: Rewriting) -> None:
        """Raises ``WorkflowError`` for a model that has no steps in it, and for no parts."""
        steps = [node for node in rewriting.nodes if node.model.kind is TaskKind.DENOISE]
        chosen = [node for node in steps if self.model in (None, node.model.name)]
        if self.sp < 1:
            raise WorkflowError(f"sp must be at least 1, got {self.sp}", rewriting.workflow.place)
        if not chosen:
            names = ", ".join(dict.fromkeys(node.model.name for node in steps))
            raise WorkflowError(f"{self.model} has no steps, models: {names}", rewriting.workflow.place)
        for node in chosen:
            node.allowed = self._allows

    def _allows(self, spec: ParallelSpec) -> bool:
        return spec.sp <= self.sp and spec.cfg <= (2 if self.cfg else 1)
