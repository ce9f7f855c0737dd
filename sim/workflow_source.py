"""What a simulation needs of workflows, by the name of a mix or from a Python file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from gfdit.core import Request, TaskGraph
from gfdit.core.components import Component
from gfdit.core.cost.file import CostTable
from gfdit.sim.costs.workflow_costs import LOAD_BYTES_PER_S
from gfdit.sim.workflow_mixes import MIXES, mix_of
from gfdit.workflow.compiling import load_workflows


class WorkflowSource:
    """``spec`` is a mix of :data:`~gfdit.sim.workflow_mixes.MIXES`, or a Python file with workflows.

    In a trace, ``model`` is the name of a workflow. A mix has costs; a file needs a table whose models are the
    names of components, as ``gfdit workflows`` lists them. What has no time to load is loaded at
    ``load_bytes_per_s``. Raises ``ValueError`` for another name, and of one line for a file with a mistake.
    """

    def __init__(self, spec: str, load_bytes_per_s: float = LOAD_BYTES_PER_S) -> None:
        if not load_bytes_per_s > 0:
            raise ValueError(f"components must be loaded at more than 0 bytes a second, got {load_bytes_per_s:g}")
        self._spec, self._load_bytes_per_s = spec, load_bytes_per_s
        self._mix = mix_of(spec) if spec in MIXES else None
        if self._mix is None:
            if not spec.endswith(".py"):
                raise ValueError(f"there are no workflows {spec!r}; a file.py, or one of: {', '.join(MIXES)}")
            self._file = load_workflows([spec])

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads it for itself."""
        return WorkflowSource, (self._spec, self._load_bytes_per_s)

    @property
    def costs(self) -> CostTable | None:
        return None if self._mix is None else self._mix.costs

    @cached_property
    def components(self) -> tuple[Component, ...]:
        found = self._file.components({}) if self._mix is None else self._mix.components
        return tuple(
            one if one.load_s else replace(one, load_s=one.num_bytes / self._load_bytes_per_s) for one in found
        )

    def graphs(self, num_ranks: int) -> Callable[[Request], TaskGraph]:
        """What makes the graph of a request. Raises ``ValueError`` for a workflow that there is not."""

        def graph(request: Request) -> TaskGraph:
            if self._mix is not None:
                if request.model not in self._mix.variants:
                    known = ", ".join(self._mix.variants)
                    raise ValueError(f"request {request.id}: no workflow {request.model!r}, workflows: {known}")
                compiled = self._mix.compiled(request.model)
            else:
                compiled = self._file.get(request.model, request.num_steps)
            return compiled.graph(request.id, num_ranks, request.cfg)

        return graph
