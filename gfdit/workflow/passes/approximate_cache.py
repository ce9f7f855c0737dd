"""Approximate caching: steps are skipped where latents of a similar prompt are there (paper, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from gfdit.core.tasks import TaskKind
from gfdit.workflow.caching import DEFAULT_BYTES, DEFAULT_SIMILARITY, LookUp, PutIn
from gfdit.workflow.model import Embeddings, Latents
from gfdit.workflow.recording import Node, Value, WorkflowError
from gfdit.workflow.rewriting import Rewriting


@dataclass(frozen=True)
class ApproximateCache:
    """Skips the first ``skip`` steps. A cache is one workflow's, on ``rank``: at most ``max_bytes`` of latents.

    A cached workflow begins with a look-up in the place of the noise, and lacks these steps. Without a hit the
    request begins again with noise, and what it makes of it is put in on its way.
    """

    skip: int
    similarity: float = DEFAULT_SIMILARITY
    max_bytes: int = DEFAULT_BYTES
    rank: int = 0

    def apply(self, rewriting: Rewriting) -> None:
        """Raises ``WorkflowError`` for too few steps and for nets, whose images the embeddings do not show."""
        workflow = rewriting.workflow
        steps = [node for node in rewriting.nodes if node.model.kind is TaskKind.DENOISE]
        if not 0 < self.skip < len(steps):
            raise WorkflowError(f"of {len(steps)} steps {self.skip} cannot be skipped", workflow.place)
        if any(node.model.kind is TaskKind.CONTROL for node in rewriting.nodes):
            raise WorkflowError("a workflow with nets cannot begin with cached latents", workflow.place)
        noise, embeds = _read(steps[0], Latents).node, _read(steps[0], Embeddings)
        latents = rewriting.value(steps[self.skip - 1])
        where = noise.model, workflow.name, self.skip, self.max_bytes, self.similarity, self.rank
        if rewriting.cached:
            found = rewriting.insert(LookUp(*where), {**noise.bindings, "embeds": embeds})
            rewriting.redirect(latents, rewriting.value(found))
        else:
            rewriting.insert(PutIn(*where), {"latents": latents, "embeds": embeds}, keep=True)


def _read(node: Node, type: type) -> Value:
    for value in node.values(deferred=False):
        if value.port.type is type:
            return value
    raise WorkflowError(f"{node.name} reads no {type.__name__}, so it cannot begin with cached ones", node.place)
