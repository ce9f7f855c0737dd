"""Asynchronous loading of LoRAs: reading begins before the first step, patching follows (paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gfdit.core.tasks import TaskKind
from gfdit.workflow.model import Call, Condition, Model
from gfdit.workflow.rewriting import Rewriting


class ReadPatches(Model):
    """Begins to read the LoRAs of ``base``, and does not wait. Of the same component, so it runs where that is."""

    kind = TaskKind.ENCODE

    def __init__(self, base: Model) -> None:
        super().__init__(
            base.source, name=f"{base.name}-lora", dtype=base.dtype, pinned=base.pinned, ranks=base.ranks
        )
        self.base = base

    @property
    def component(self) -> str:
        return self.base.component

    @property
    def loader(self) -> Model:
        return self.base

    def setup_io(self) -> None:
        self.add_output("begun", Condition)

    def execute(self, components: Any, call: Call, *_: Any, **inputs: Any) -> Mapping[str, Any]:
        self.base.read_patches(components)
        return {"begun": {}}


@dataclass(frozen=True)
class AsynchronousLora:
    """For every model with LoRAs a call at the start. A LoRA is active from the step after it has been read.

    All ranks of a step decide that together, in the executor; with ``Patch.step`` it is that step.
    """

    def apply(self, rewriting: Rewriting) -> None:
        bases = dict.fromkeys(node.model for node in rewriting.nodes if node.model.patches)
        for base in bases:
            rewriting.insert(ReadPatches(base), {}, keep=True)
