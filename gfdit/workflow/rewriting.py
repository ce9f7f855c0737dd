"""What passes of the compiler do to a workflow: insert, replace and remove nodes of a copy (paper, section 4.2).

Types are checked as they were when the author's calls were recorded. A node that nothing reads any more goes by
itself, so a pass only says who reads what instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from gfdit.workflow.model import Model
from gfdit.workflow.recording import Input, Node, Value, Workflow, WorkflowError


class Pass(Protocol):
    """Matches nodes and changes them."""

    def apply(self, rewriting: Rewriting) -> None:
        """Raises ``WorkflowError`` for a workflow that it cannot serve."""
        ...


class Rewriting:
    """A copy of ``workflow``, to be changed. ``cached``: it begins with what a cache has, see ``caching``."""

    def __init__(self, workflow: Workflow, *, cached: bool = False) -> None:
        self.cached = cached
        self.workflow = made = Workflow(workflow.name, workflow.steps, workflow.passes)
        made.place = workflow.place
        made.inputs = {name: replace(one, workflow=made) for name, one in workflow.inputs.items()}
        made._names = workflow._names.copy()
        self._kept: set[Node] = set()
        nodes: dict[Node, Node] = {}
        values: dict[Value, Value] = {}

        def copied(bound: Any) -> Any:
            if isinstance(bound, (list, tuple)):
                return [copied(one) for one in bound]
            if isinstance(bound, Input):
                return made.inputs[bound.name]
            if isinstance(bound, Value):
                return values.setdefault(bound, Value(nodes[bound.node], bound.port))
            return bound

        for node in workflow.nodes:
            bindings = {name: copied(bound) for name, bound in node.bindings.items()}
            nodes[node] = replace(node, workflow=made, bindings=bindings)
        made.nodes = list(nodes.values())
        made.output, made.output_name = copied(workflow.output), workflow.output_name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.workflow.nodes)

    def value(self, node: Node, output: str | None = None) -> Value:
        """An output of ``node``, by default the first, as others read it."""
        name = output or next(iter(node.model.outputs))
        for reader in self.nodes:
            for value in (*reader.values(deferred=False), *reader.values(deferred=True)):
                if value.node is node and value.port.name == name:
                    return value
        return Value(node, node.model.outputs[name])

    def insert(self, model: Model, inputs: dict[str, Any], step: int | None = None, *, keep: bool = False) -> Node:
        """A call of ``model``, after what it reads. ``keep`` it even if nothing reads what it makes."""
        nodes = self.workflow.nodes
        node = self.workflow.record(model, step, inputs)
        nodes.pop()
        node.place = self.workflow.place
        read = [value.node for deferred in (False, True) for value in node.values(deferred=deferred)]
        nodes.insert(1 + max(map(nodes.index, read), default=-1), node)
        if keep:
            self._kept.add(node)
        return node

    def redirect(self, value: Value, to: Value, *, spare: Node | None = None) -> None:
        """Who reads ``value``, but for ``spare``, reads ``to`` from now on."""
        if not issubclass(to.port.type, value.port.type):
            made, wanted = to.port.type.__name__, value.port.type.__name__
            raise WorkflowError(f"{to.node.name} makes {made} in the place of {wanted}", to.node.place)
        for node in self.workflow.nodes:
            if node is not spare:
                node.bindings = {name: _instead(bound, value, to) for name, bound in node.bindings.items()}
        self.workflow.output = _instead(self.workflow.output, value, to)

    def sweep(self) -> None:
        """Remove what nothing reads."""
        needed = self._kept.copy()
        if self.workflow.output is not None:
            needed.add(self.workflow.output.node)
        for node in reversed(self.workflow.nodes):  # readers come after what they read
            if node in needed:
                needed.update(value.node for deferred in (False, True) for value in node.values(deferred=deferred))
        self.workflow.nodes = [node for node in self.workflow.nodes if node in needed]


def rewritten(workflow: Workflow, passes: tuple[Pass, ...], *, cached: bool = False) -> Workflow:
    """``workflow`` as ``passes`` leave it; itself if there are none."""
    if not passes:
        return workflow
    rewriting = Rewriting(workflow, cached=cached)
    for one in passes:
        one.apply(rewriting)
        rewriting.sweep()
    return rewriting.workflow


def _instead(bound: Any, value: Value, to: Value) -> Any:
    if isinstance(bound, list):
        return [_instead(one, value, to) for one in bound]
    same = isinstance(bound, Value) and bound.node is value.node and bound.port is value.port
    return to if same else bound
