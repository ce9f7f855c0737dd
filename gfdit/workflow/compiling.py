"""From recorded nodes to task graphs and to the table of components (LegoDiffusion paper, section 4.2)."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from gfdit.core.components import Component
from gfdit.core.json_fields import has_half_pairs, shown
from gfdit.core.tasks import Task, TaskGraph, TaskKind
from gfdit.workflow.model import Embeddings, Model
from gfdit.workflow.passes import ApproximateCache, AsynchronousLora
from gfdit.workflow.recording import Builder, Input, Node, Value, Workflow, WorkflowError
from gfdit.workflow.rewriting import rewritten

REQUEST_INPUTS = "inputs"
"""The artifact with what a request brings, for nodes that have others as well."""
_CACHED = "+cached"


@dataclass(eq=False)
class CompiledWorkflow:
    """A recorded workflow, rewritten by its passes and ready to make the tasks of a request.

    If one of them is :class:`~gfdit.workflow.passes.ApproximateCache`, there is also the ``cached`` one, which
    fails with :class:`~gfdit.workflow.caching.CacheMiss` where nothing similar is there.

    Tasks are named after nodes, artifacts ``<node's model>.<output>/<step>``. A task without inputs gets what the
    request brings itself; the first of these hands it on to nodes that need it later.
    """

    workflow: Workflow
    cached: bool = False
    nodes: dict[str, Node] = field(init=False)
    num_steps: int = field(init=False)
    """Of the schedule, also where a cache saves some of them."""

    def __post_init__(self) -> None:
        if self.cached and not self.has_cache:
            raise ValueError(f"workflow {self.name} has no cache")
        self.num_steps = sum(node.model.kind is TaskKind.DENOISE for node in self.workflow.nodes)
        self.workflow = rewritten(self.workflow, (*self.workflow.passes, *self._own_passes()), cached=self.cached)
        self.nodes = {node.name: node for node in self.workflow.nodes}
        self._artifacts: dict[tuple[str, str], str] = {}  # by node and output
        for node in self.workflow.nodes:
            base, _, step = node.name.partition("/")
            for name in node.model.outputs:
                self._artifacts[node.name, name] = f"{base}.{name}/{step or 0}"
        self._relays = any(not self._is_root(node) and node.request_inputs for node in self.workflow.nodes)
        # Recorded in order, so that nothing is read before it is made.
        roots = [node for node in self.workflow.nodes if self._is_root(node)]
        self._first_root = next((node for node in roots if node.request_inputs), roots[0])

    @property
    def name(self) -> str:
        return self.workflow.name

    @property
    def models(self) -> list[Model]:
        """Each once, in the order of their first calls."""
        return list({id(node.model): node.model for node in self.workflow.nodes}.values())

    @property
    def has_cache(self) -> bool:
        return any(isinstance(one, ApproximateCache) for one in self.workflow.passes)

    @property
    def key(self) -> str:
        """By which :meth:`Workflows.node` finds it."""
        return f"{self.name}:{self.workflow.steps}{_CACHED if self.cached else ''}"

    def _own_passes(self) -> list[AsynchronousLora]:
        return [AsynchronousLora()] if any(node.model.patches for node in self.workflow.nodes) else []

    def artifact(self, value: Value) -> str:
        """Without the request's name."""
        return self._artifacts[value.node.name, value.port.name]

    def outputs(self, node: Node) -> tuple[str, ...]:
        """The artifacts that ``node`` makes, in the order of its outputs; none is made of the request's output."""
        assert self.workflow.output is not None
        if node is self.workflow.output.node:
            return ()
        made = [self._artifacts[node.name, name] for name in node.model.outputs]
        return (*made, REQUEST_INPUTS) if self._relays and node is self._first_root else tuple(made)

    def inputs(self, node: Node) -> tuple[str, ...]:
        names = dict.fromkeys(self.artifact(value) for value in node.values(deferred=False))
        if names and node.request_inputs:
            names[REQUEST_INPUTS] = None
        return tuple(names)

    def graph(self, request_id: str, num_ranks: int, guided: bool) -> TaskGraph:
        """Raises ``ValueError`` for what no order of tasks can serve."""

        def named(names: Iterable[str]) -> tuple[str, ...]:
            return tuple([f"{request_id}/{name}" for name in names])

        tasks = []
        for node in self.workflow.nodes:
            model = node.model
            specs = model.candidates(num_ranks, guided)
            if node.allowed is not None:
                specs = tuple([spec for spec in specs if node.allowed(spec)])
            tasks.append(
                Task(
                    f"{request_id}/{node.name}",
                    request_id,
                    model.kind,
                    node.step or 0,
                    named(self.inputs(node)),
                    named(self.outputs(node)),
                    specs,
                    named(dict.fromkeys(self.artifact(value) for value in node.values(deferred=True))),
                    model.component,
                    f"{self.key}/{node.name}",
                )
            )
        graph = TaskGraph(request_id, tuple(tasks))
        graph.check()
        return graph

    def guided(self, given: Mapping[str, Any]) -> bool:
        """Whether steps compute both branches of guidance, by what :meth:`given` returned."""

        def guided(node: Node) -> bool:
            bound = {k: given[v.name] if isinstance(v, Input) else v for k, v in node.bindings.items()}
            return node.model.guided({k: v for k, v in bound.items() if not isinstance(v, (Value, list))})

        steps = [node for node in self.workflow.nodes if node.model.kind is TaskKind.DENOISE and guided(node)]
        read = [value for node in steps for value in node.values(deferred=False) if value.port.type is Embeddings]
        return any(guided(encoder) for encoder in {value.node for value in read})

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a request brings, with defaults. Raises ``ValueError`` naming the input and what is allowed."""
        known = self.workflow.inputs
        for name in values:
            if name not in known:
                raise ValueError(f"workflow {self.name} has no input {name!r}, inputs: {', '.join(known)}")
        given = {}
        for name, one in known.items():
            if name not in values or values[name] is None:
                if one.required:
                    raise ValueError(f"workflow {self.name} needs the input {name!r} ({one.type.__name__})")
                given[name] = one.default
                continue
            given[name] = _converted(values[name], one)
        return given

    def _is_root(self, node: Node) -> bool:
        return not node.values(deferred=False) and not node.values(deferred=True)


class Workflows:
    """All workflows of a server, by name; recorded again for every number of steps that is asked for."""

    def __init__(self, builders: Iterable[Builder]) -> None:
        """Raises ``WorkflowError`` for two of one name."""
        self._builders: dict[str, Builder] = {}
        self._compiled: dict[tuple[str, int, bool], CompiledWorkflow] = {}
        for builder in builders:
            if builder.name in self._builders:
                raise WorkflowError(f"there are two workflows {builder.name}", builder.build(builder.steps).place)
            self._builders[builder.name] = builder
        if not self._builders:
            raise ValueError("there is no workflow")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._builders)

    def get(self, name: str, steps: int | None = None, *, cached: bool = False) -> CompiledWorkflow:
        """Raises ``ValueError`` for a name that there is not, and for a number of steps that it cannot have."""
        if (builder := self._builders.get(name)) is None:
            raise ValueError(f"there is no workflow {shown(name)}, workflows: {', '.join(self._builders)}")
        key = name, builder.steps if steps is None else steps, cached
        if key not in self._compiled:
            self._compiled[key] = CompiledWorkflow(builder.build(key[1]), cached)
        return self._compiled[key]

    def node(self, name: str) -> tuple[CompiledWorkflow, Node]:
        """The node of a task, by its ``node``."""
        of, _, node = name.partition("/")
        workflow, _, steps = of.rpartition(":")
        compiled = self.get(workflow, int(steps.removesuffix(_CACHED)), cached=steps.endswith(_CACHED))
        return compiled, compiled.nodes[node]

    @property
    def models(self) -> dict[str, Model]:
        """One by component; what is said of any of those that share it counts."""
        found: dict[str, Model] = {}
        for name in self._builders:
            for model in self.get(name).models:
                found.setdefault(model.component, model.loader)
        return found

    def users(self, component: str) -> list[str]:
        """Workflows that need ``component``."""
        return [name for name in self._builders if any(m.component == component for m in self.get(name).models)]

    def components(
        self, num_bytes: Mapping[str, int], load_s: Mapping[str, float] | None = None
    ) -> list[Component]:
        """By default with the bytes that are on disk.

        Raises ``ValueError`` where two workflows want the same component on different ranks.
        """
        table: dict[str, Component] = {}
        for name in self._builders:
            for model in self.get(name).models:
                one = Component(
                    model.component,
                    num_bytes.get(model.component) or model.loader.stored_bytes() or 0,
                    (load_s or {}).get(model.component, 0.0),
                    model.pinned,
                    model.ranks,
                )
                known = table.setdefault(model.component, one)
                if (known.pinned, known.ranks) != (one.pinned, one.ranks):
                    raise WorkflowError(
                        f"{model.component} is shared, but pinned or on ranks differently", model.place
                    )
        return list(table.values())


def load_workflows(paths: Iterable[str | Path]) -> Workflows:
    """The workflows in Python files: every :class:`Workflow` and every function decorated with ``workflow``.

    Raises ``ValueError`` of one line, with the place, for a file that cannot be read or has none.
    """
    builders: list[Builder] = []
    for path in map(Path, paths):
        found = [_builder(value) for value in vars(_load(path)).values() if isinstance(value, (Workflow, Builder))]
        if not found:
            raise ValueError(f"{path}: there is no workflow in it")
        builders += {builder.name: builder for builder in found}.values()
    return Workflows(builders)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    name = f"gfdit_workflow_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # places are told with this path
    except WorkflowError:
        raise
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}:{own[-1].lineno}" if own else str(path)
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
    return module


def _builder(found: Workflow | Builder) -> Builder:
    if isinstance(found, Builder):
        return found

    def build(steps: int) -> Workflow:
        if steps != found.steps:
            raise ValueError(f"workflow {found.name} has {found.steps} steps, not {steps}")
        return found

    return Builder(found.name, found.steps, build)


def _converted(value: Any, one: Input) -> Any:
    if one.type not in (str, int, float, bool):
        return value
    found = value
    if one.type is float and isinstance(value, int) and not isinstance(value, bool):
        found = float(value) if abs(value) <= sys.float_info.max else math.inf
    is_one = isinstance(found, one.type) and not (one.type is int and isinstance(found, bool))
    match found:
        case float():
            is_one &= math.isfinite(found)
        case str():
            is_one &= not has_half_pairs(found)
        case int():
            is_one &= -(2**63) <= found < 2**63
    if not is_one:
        raise ValueError(f"input {one.name!r} must be {one.type.__name__}, got {shown(value)}")
    return found
