"""A request of a workflow on one rank, node by node, or together with other ranks.

Runs in forked processes that have imported vLLM-Omni; who names these functions has not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from gfdit.adapters.testing.fingerprint import differences, fingerprint
from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.migration.codec import FieldCodec
from gfdit.migration.parts import ArtifactParts
from gfdit.workflow.compiling import CompiledWorkflow, Workflows, load_workflows
from gfdit.workflow.recording import Input, Node, Value

if TYPE_CHECKING:
    from gfdit.adapters.testing.component_rank import Call, ComponentRank


@dataclass(frozen=True)
class WorkflowRequest:
    """``values`` are what it brings; its steps are those of the workflow ``name`` in ``file``, unless said."""

    file: str
    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r:.40}" for name, value in self.values.items())
        return f"{self.name}({said})"


@dataclass(frozen=True)
class Outcome:
    """``output`` is what the last node made. ``faults`` say what a node did that it must not."""

    output: torch.Tensor
    faults: tuple[str, ...]


@cache
def _workflows(file: str) -> Workflows:
    return load_workflows([file])


def compiled(request: WorkflowRequest) -> CompiledWorkflow:
    return _workflows(request.file).get(request.name, request.steps)


class Run:
    """``specs`` are the degrees of its steps, in turn; without any all is done by each rank alone.

    Ranks of a degree are neighbours: those from a multiple of it on. With ``audit`` every node runs twice, its
    inputs are looked at before and after, and what it makes goes through the codec of moves.
    """

    def __init__(
        self,
        rank: ComponentRank,
        request: WorkflowRequest,
        specs: Sequence[ParallelSpec] = (),
        *,
        audit: bool = False,
    ) -> None:
        self._rank, self._specs, self._audit = rank, specs or (SINGLE,), audit
        self._compiled = compiled(request)
        self._given = self._compiled.given(request.values)
        self._made: dict[tuple[str, str], Any] = {}
        self.faults: list[str] = []

    def nodes(self) -> Iterator[None]:
        """Runs one after the other."""
        for node in self._compiled.workflow.nodes:
            self._run(node)
            yield

    def finish(self) -> Outcome:
        output = self._compiled.workflow.output
        assert output is not None
        return Outcome(self._made[output.node.name, output.port.name].clone(), tuple(self.faults))

    def _run(self, node: Node) -> None:
        from gfdit.adapters.testing.component_rank import Arrived

        self._rank.host.load(node.model)
        inputs = {name: self._input(node, name) for name in node.bindings}
        inputs = {name: value for name, value in inputs.items() if value is not None}
        before = fingerprint(inputs) if self._audit else {}
        call, outputs = self._execute(node, inputs)
        if self._audit:
            if changed := differences(fingerprint(inputs), before):
                self.faults.append(f"{node.name} changes its input {changed[0]}")
            made = fingerprint({**outputs, **call.parts})
            again, repeated = self._execute(node, inputs)
            if changed := differences(fingerprint({**repeated, **again.parts}), made):
                self.faults.append(f"{node.name} makes another {changed[0]} when it runs again")
        for port in node.model.outputs.values():
            if port.streamed:
                self._made[node.name, port.name] = Arrived(call.parts.get(port.name, []))
            else:
                value = outputs[port.name]
                self._made[node.name, port.name] = (
                    _moved(value) if self._audit and isinstance(value, dict) else value
                )

    def _execute(self, node: Node, inputs: Mapping[str, Any]) -> tuple[Call, dict[str, Any]]:
        from gfdit.adapters.testing.component_rank import Call

        step = node.step or 0
        spec = SINGLE
        if node.model.kind is TaskKind.DENOISE:
            spec = self._specs[step % len(self._specs)]
        own = self._rank.comm.rank
        first = own // spec.size * spec.size
        layout = ExecutionLayout(tuple(range(first, first + spec.size)), spec)
        call = Call(layout, step_index=step, num_steps=self._compiled.num_steps, patches=list(node.model.patches))
        return call, dict(self._rank.host.execute(node.model, call, dict(inputs)))

    def _input(self, node: Node, name: str) -> Any:
        bound = node.bindings[name]
        if node.model.inputs[name].many:
            return [self._value(one) for one in bound]
        return self._value(bound)

    def _value(self, one: Any) -> Any:
        if isinstance(one, Input):
            return self._given[one.name]
        return self._made[one.node.name, one.port.name] if isinstance(one, Value) else one


def _moved(value: dict[str, Any]) -> dict[str, Any]:
    """As it is after a move to another rank."""
    codec = FieldCodec()
    parts = codec.pack(value)
    tensors = tree_map_only(torch.Tensor, torch.clone, dict(parts.tensors))
    return dict(codec.unpack(ArtifactParts(parts.metadata, tensors), torch.device("cpu")))


# What the checks call, in a rank


def run(
    rank: ComponentRank, request: WorkflowRequest, specs: Sequence[ParallelSpec] = (), audit: bool = False
) -> Outcome:
    made = Run(rank, request, specs, audit=audit)
    for _ in made.nodes():
        pass
    return made.finish()


def run_in_turns(
    rank: ComponentRank, requests: Sequence[WorkflowRequest], specs: Sequence[ParallelSpec] = ()
) -> list[Outcome]:
    """A node of each after the other."""
    runs = [Run(rank, request, specs) for request in requests]
    left = [one.nodes() for one in runs]
    while left:
        left = [nodes for nodes in left if next(nodes, left) is None]
    return [one.finish() for one in runs]


def run_between_unloads(rank: ComponentRank, request: WorkflowRequest) -> tuple[Outcome, int]:
    """On a rank without components, which has none afterwards; and the bytes of tensors that are left there."""
    before = _bytes_without_components(rank)
    made = run(rank, request)
    return made, _bytes_without_components(rank) - before - made.output.nbytes


def _bytes_without_components(rank: ComponentRank) -> int:
    for name in list(rank.host.resident):
        rank.host.unload(name)
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def candidates(rank: ComponentRank, request: WorkflowRequest, num_ranks: int) -> list[ParallelSpec]:
    """Degrees of all steps."""
    one = compiled(request)
    guided = one.guided(one.given(request.values))
    steps = [node for node in one.workflow.nodes if node.model.kind is TaskKind.DENOISE]
    found = [
        {spec for spec in node.model.candidates(num_ranks, guided) if node.allowed is None or node.allowed(spec)}
        for node in steps
    ]
    return sorted(set.intersection(*found), key=lambda spec: (spec.size, spec.cfg)) if found else [SINGLE]
