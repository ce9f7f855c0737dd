"""`gfdit workflows`: what is in a workflow file, read without loading a model."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gfdit.workflow.compiling import CompiledWorkflow, Workflows, load_workflows
from gfdit.workflow.model import Model
from gfdit.workflow.recording import Input, Node

GIB = 2**30


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.py", help="what `gfdit serve --workflow` takes")
    parser.add_argument("--workflow", action="append", metavar="NAME", help="only this one (repeatable)")
    parser.add_argument("--steps", type=int, metavar="N", help="recorded with so many steps")
    parser.add_argument("--cached", action="store_true", help="as they run where a similar prompt is in the cache")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for every workflow")
    parser.add_argument("--plot", metavar="PATH", help="draw the graphs into this .png or .svg")


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    workflows = load_workflows(args.files)
    chosen = [workflows.get(name, args.steps, cached=args.cached) for name in args.workflow or workflows.names]
    if args.plot:
        from gfdit.sim.workflow_plot import plot_workflows

        plot_workflows(chosen, args.plot)
    if args.json:
        for one in chosen:
            print(json.dumps(described(one, workflows)))
        return 0
    for one in chosen:
        print("\n".join([*_workflow_lines(one), ""]))
    print("\n".join(_component_lines(chosen, workflows)))
    return 0


def described(one: CompiledWorkflow, workflows: Workflows) -> dict[str, Any]:
    """What `--json` prints; nodes are tasks, in an order in which they can run."""
    graph = one.graph(one.name, 1, guided=False)
    tasks = {task.node.partition("/")[2]: task for task in graph.tasks}
    nodes = [
        {
            "name": node.name,
            "kind": str(node.model.kind),
            "component": node.model.component,
            "reads": [name.removeprefix(f"{one.name}/") for name in tasks[node.name].inputs],
            "reads_deferred": [name.removeprefix(f"{one.name}/") for name in tasks[node.name].deferred],
        }
        for node in one.nodes.values()
    ]
    components = [
        {"name": model.component, "bytes": model.loader.stored_bytes(), "users": workflows.users(model.component)}
        for model in _distinct([one])
    ]
    inputs = {name: {"type": i.type.__name__, "required": i.required} for name, i in one.workflow.inputs.items()}
    return {
        "name": one.name,
        "steps": one.num_steps,
        "inputs": inputs,
        "nodes": nodes,
        "components": components,
    }


def _workflow_lines(one: CompiledWorkflow) -> Iterator[str]:
    """A line for every model, with all of its calls."""
    cached = ", with what the cache has" if one.cached else ""
    yield f"{one.name}: {one.num_steps} steps, {len(one.nodes)} tasks{cached} ({one.workflow.place})"
    yield f"  takes {', '.join(map(_input, one.workflow.inputs.values())) or 'nothing'}"
    calls: dict[str, list[Node]] = {}
    for node in one.nodes.values():
        calls.setdefault(node.name.partition("/")[0], []).append(node)
    rows = [("node", "calls", "kind", "component", "reads")]
    rows += [
        (name, str(len(nodes)), str(nodes[0].model.kind), nodes[0].model.component, ", ".join(_read(nodes)))
        for name, nodes in calls.items()
    ]
    yield from (f"  {line}" for line in _table(rows))


def _read(nodes: Sequence[Node]) -> Iterable[str]:
    """By all calls together; what is read while it is made has a mark."""
    found: dict[str, None] = {}
    for node in nodes:
        found |= dict.fromkeys(one.name for one in node.request_inputs)
        for deferred, mark in ((False, ""), (True, " (deferred)")):
            for value in node.values(deferred=deferred):
                found[f"{value.node.name.partition('/')[0]}.{value.port.name}{mark}"] = None
    return found


def _component_lines(chosen: Sequence[CompiledWorkflow], workflows: Workflows) -> Iterator[str]:
    models = _distinct(chosen)
    sizes = {model.component: model.loader.stored_bytes() for model in models}
    rows = [("component", "GiB", "ranks", "used by")]
    for model in models:
        size = sizes[model.component]
        ranks = "all" if model.ranks is None else ",".join(map(str, model.ranks))
        rows.append(
            (
                model.component,
                "?" if size is None else f"{size / GIB:.2f}",
                f"{ranks}, pinned" if model.pinned else ranks,
                ", ".join(workflows.users(model.component) or [one.name for one in chosen]),
            )
        )
    yield from _table(rows)
    if all(size is None for size in sizes.values()):
        return
    apart = sum(sizes[model.component] or 0 for one in chosen for model in _distinct([one]))
    together = sum(size or 0 for size in sizes.values())
    unknown = " (without those of unknown size)" if None in sizes.values() else ""
    yield f"{together / GIB:.2f} GiB, {apart / GIB:.2f} GiB if nothing were shared{unknown}"


def _distinct(chosen: Iterable[CompiledWorkflow]) -> list[Model]:
    """Models, one by component."""
    found: dict[str, Model] = {}
    for one in chosen:
        for model in one.models:
            found.setdefault(model.component, model)
    return list(found.values())


def _input(one: Input) -> str:
    default = "" if one.required else f" = {one.default!r:.40}"
    return f"{one.name}: {one.type.__name__}{default}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
