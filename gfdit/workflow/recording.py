"""Recording workflows: calls of models become nodes, and mistakes are told with the author's line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gfdit.core.layouts import ParallelSpec
    from gfdit.workflow.model import Model, Port
    from gfdit.workflow.rewriting import Pass

_current: ContextVar[Workflow | None] = ContextVar("workflow", default=None)
DEFAULT_STEPS = 28


class WorkflowError(ValueError):
    """A mistake in a workflow, with the file and line where it was made."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(f"{place or place_of_author()}: {message}")


def place_of_author() -> str:
    """File and line of the nearest caller that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("gfdit.") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Input:
    """What a request brings. ``default`` unless it is required."""

    workflow: Workflow
    name: str
    type: type
    required: bool
    default: Any
    place: str

    def __repr__(self) -> str:
        return f"the input {self.name}"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Value:
    """An output of a node."""

    node: Node
    port: Port

    def __repr__(self) -> str:
        return f"{self.port.name} of {self.node.name}"


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A call of ``model``. ``bindings`` are values by input, lists of them for one of ``many``, or constants.

    With ``allowed`` it runs at those of the model's specifications that this accepts.
    """

    workflow: Workflow
    name: str
    model: Model
    step: int | None
    bindings: Mapping[str, Any]
    place: str
    allowed: Callable[[ParallelSpec], bool] | None = None

    def __repr__(self) -> str:
        return f"{self.name} of workflow {self.workflow.name}"

    def values(self, *, deferred: bool) -> list[Value]:
        """What other nodes make of its inputs, of either kind."""
        return [
            value
            for name, bound in self.bindings.items()
            if self.model.inputs[name].deferred is deferred
            for value in _each(bound)
            if isinstance(value, Value)
        ]

    @property
    def request_inputs(self) -> list[Input]:
        return [value for bound in self.bindings.values() for value in _each(bound) if isinstance(value, Input)]


@dataclass(eq=False, repr=False)
class Workflow:
    """Records the calls of models in its ``with`` block. ``steps`` of the denoising loop, for those who ask.

    ``passes`` rewrite what was recorded when it is compiled, in this order.
    """

    name: str
    steps: int = DEFAULT_STEPS
    passes: tuple[Pass, ...] = ()
    inputs: dict[str, Input] = field(default_factory=dict, init=False)
    nodes: list[Node] = field(default_factory=list, init=False)
    output: Value | None = field(default=None, init=False)
    output_name: str = field(default="", init=False)
    place: str = field(default="", init=False)
    _names: Counter[str] = field(default_factory=Counter, init=False)
    _token: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.place = place_of_author()
        if not self.name or any(character in self.name for character in "/: "):
            raise WorkflowError(f"a workflow's name has no '/', ':' or blank, got {self.name!r}")
        if self.steps < 1:
            raise WorkflowError(f"steps must be at least 1, got {self.steps}")

    def __repr__(self) -> str:
        return f"workflow {self.name}"

    def __enter__(self) -> Workflow:
        if _current.get() is not None:
            raise WorkflowError(f"workflow {self.name} begins inside of another one")
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _current.reset(self._token)
        if kind is None:
            self._check()

    def add_input(self, name: str, type: type, default: Any = ...) -> Input:
        """What a request must bring, or may if there is a ``default``."""
        if name in self.inputs:
            raise WorkflowError(f"input {name} is added twice")
        if default is not ... and default is not None and not _is_a(default, type):
            raise WorkflowError(f"the default of input {name} must be {type.__name__}, got {default!r}")
        made = Input(self, name, type, default is ..., None if default is ... else default, place_of_author())
        self.inputs[name] = made
        return made

    def add_output(self, value: Any, name: str = "image") -> None:
        """What the request gets: an output of a node that nothing else reads."""
        if not isinstance(value, Value) or value.node.workflow is not self:
            raise WorkflowError(
                f"output {name} must be a value that a model of this workflow makes, got {value!r}"
            )
        if self.output is not None:
            raise WorkflowError(f"output {name} is the second one, after {self.output_name}")
        self.output, self.output_name = value, name

    def record(self, model: Model, step: int | None, inputs: Mapping[str, Any]) -> Node:
        self._check_inputs(model, inputs)
        name = model.name if step is None else f"{model.name}/{step}"
        self._names[name] += 1
        if (number := self._names[name]) > 1:
            name = f"{model.name}-{number}" if step is None else f"{model.name}-{number}/{step}"
        given = {key: value for key, value in inputs.items() if value is not None and value != []}
        node = Node(self, name, model, step, given, place_of_author())
        self.nodes.append(node)
        return node

    def _check_inputs(self, model: Model, inputs: Mapping[str, Any]) -> None:
        for name in inputs:
            if name not in model.inputs:
                raise WorkflowError(f"{model.name} has no input {name}, inputs: {', '.join(model.inputs)}")
        for name, port in model.inputs.items():
            given = inputs.get(name)
            if given is None:
                if not port.optional:
                    raise WorkflowError(f"{model.name} lacks its input {name} ({port.type.__name__})")
                continue
            if isinstance(given, (list, tuple)) and not port.many:
                raise WorkflowError(f"{model.name} takes one value for {name}, got {len(given)}")
            for value in _each(given):
                self._check_value(model, port, value)

    def _check_value(self, model: Model, port: Port, value: Any) -> None:
        if isinstance(value, (Value, Input)):
            owner = value.node.workflow if isinstance(value, Value) else value.workflow
            if owner is not self:
                raise WorkflowError(f"{port.name} of {model.name} is a value of workflow {owner.name}")
            made = value.port.type if isinstance(value, Value) else value.type
            if not issubclass(made, port.type) and not (made is int and port.type is float):
                raise WorkflowError(
                    f"{port.name} of {model.name} must be {port.type.__name__}, got {made.__name__}"
                )
            if isinstance(value, Value) and value.port.streamed and not port.deferred:
                raise WorkflowError(f"{port.name} of {model.name} is not deferred, and cannot read a stream")
        elif not _is_a(value, port.type):
            raise WorkflowError(f"{port.name} of {model.name} must be {port.type.__name__}, got {value!r:.60}")

    def _check(self) -> None:
        """What only shows when all is recorded."""
        if self.output is None:
            raise WorkflowError(f"workflow {self.name} has no output", self.place)
        readers: dict[Value, list[Node]] = {}
        used: set[str] = set()
        for node in self.nodes:
            used.update(one.name for one in node.request_inputs)
            for value in (*node.values(deferred=False), *node.values(deferred=True)):
                readers.setdefault(value, []).append(node)
        for name, one in self.inputs.items():
            if name not in used:
                raise WorkflowError(f"input {name} is used by no model", one.place)
        read = {value.node for value in readers}
        for node in self.nodes:
            if node is self.output.node:
                if node in read:
                    raise WorkflowError(f"what {node.name} makes is the output, and read as well", node.place)
            elif node not in read:
                raise WorkflowError(f"what {node.name} makes is used by nothing", node.place)
        for value, nodes in readers.items():
            if value.port.streamed and len(nodes) > 1:
                raise WorkflowError(
                    f"{value.port.name} of {value.node.name} is streamed, and read twice", nodes[1].place
                )


def record(model: Model, step: int | None, inputs: Mapping[str, Any]) -> Any:
    """A call of ``model`` inside of the workflow that is being recorded."""
    if (current := _current.get()) is None:
        raise WorkflowError(
            f"{model.name} is called outside of a workflow: use it in a `with Workflow(...)` block"
        )
    node = current.record(model, step, inputs)
    values = tuple(Value(node, port) for port in model.outputs.values())
    return values[0] if len(values) == 1 else values


@dataclass(eq=False)
class Builder:
    """A function that records a workflow with a number of steps; recorded once for each number."""

    name: str
    steps: int
    build: Callable[[int], Workflow]

    def __post_init__(self) -> None:
        self.build = cache(self.build)


def workflow(steps: int = DEFAULT_STEPS) -> Callable[[Callable[[int], Workflow]], Builder]:
    """Decorates a function of the number of steps that returns a :class:`Workflow`; ``steps`` unless asked for."""

    def decorate(build: Callable[[int], Workflow]) -> Builder:
        made = build(steps)
        if not isinstance(made, Workflow):
            raise WorkflowError(f"{build.__name__} must return a Workflow, got {type(made).__name__}")
        return Builder(made.name, steps, build)

    return decorate


def _each(bound: Any) -> Iterable[Any]:
    return bound if isinstance(bound, (list, tuple)) else (bound,)


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))
