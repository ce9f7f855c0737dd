"""`gfdit serve MODEL --ranks N --policy P`: `vllm serve MODEL --omni` with the elastic engine."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from gfdit.cli.pairs import parse_pairs
from gfdit.core.components import Component
from gfdit.core.control.residency import Residency
from gfdit.core.cost.file import CostTable
from gfdit.core.policy.admission import AdmissionMode
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.omni.settings import Settings

ENGINE = "gfdit.omni.engine.ElasticDiffusionEngine"
FRONT = "gfdit.omni.http_front.HttpFront"
# Settings that have an option of their own.
_OPTIONS = {
    "workflows": "--workflow",
    "policy": "--policy",
    "policy_args": "--policy-arg",
    "admission": "--admission",
    "ranks": "--ranks",
    "run_ahead": "--run-ahead",
    "ring": "--ring",
    "min_sp": "--min-sp",
    "shutdown_timeout_s": "--shutdown-timeout",
    "costs": "--costs",
    "model_name": "--model-name",
    "timeline": "--timeline",
    "record": "--record",
    "otlp_endpoint": "--otlp-endpoint",
    "comm_table": "--comm-table",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint directory or hub name vLLM-Omni can serve; with --workflow, by default its base model",
    )
    parser.add_argument(
        "--workflow",
        action="append",
        default=[],
        metavar="FILE.py",
        help="serve the workflows in this file instead of a whole model (docs/workflows.md); repeat",
    )
    parser.add_argument("--ranks", type=int, metavar="N", default=1, help="devices, one full replica on each")
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        help=f"a name (see `gfdit policies`), module:Class or file.py:Class (default: {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--policy-arg", action="append", default=[], metavar="KEY=VALUE", help="an argument of the policy; repeat"
    )
    parser.add_argument(
        "--admission",
        choices=get_args(AdmissionMode),
        default="none",
        help="deadline: reject (429) what cannot meet its deadline; promise: also what would make others late; "
        "a policy's own admission goes before",
    )
    parser.add_argument(
        "--run-ahead",
        type=int,
        choices=(0, 1),
        default=1,
        help="1: a policy may queue a request's next step behind the running one; 0: never",
    )
    parser.add_argument(
        "--ring", action="store_true", help="also sequence-parallel degrees that do not divide the attention heads"
    )
    parser.add_argument(
        "--min-sp",
        type=int,
        metavar="N",
        default=1,
        help="least sequence-parallel degree of a step, for models that one device cannot hold (default 1)",
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="S",
        default=20.0,
        help="seconds that running requests have to end after SIGTERM (default 20); then they get HTTP 503",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other setting of docs/serving.md, such as start_timeout_s=1800; repeat",
    )
    parser.add_argument("--costs", metavar="FILE", type=Path, help="cost table the policy estimates times with")
    parser.add_argument("--model-name", metavar="NAME", help="what the cost table calls the model")
    parser.add_argument("--timeline", metavar="FILE", type=Path, help="write what ran where, for Perfetto")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write every event and decision, for replay")
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send traces there: http://HOST:4318/v1/traces, or grpc://HOST:4317 (docs/observability.md)",
    )
    parser.add_argument(
        "--comm-table", metavar="FILE", type=Path, help="how collectives move data, from `gfdit bench comm --save`"
    )


def run(args: argparse.Namespace) -> int:
    """Check what can be checked in a moment, then become `vllm serve`; what follows -- is passed to it."""
    command = serve_command(args)
    os.execv(command[0], command)


def serve_command(args: argparse.Namespace) -> list[str]:
    """The `vllm serve` command line. Raises ValueError naming a wrong argument and what is allowed."""
    components: list[Component] = []
    if args.workflow:
        from gfdit.adapters.workflow_requests import WorkflowAdapter  # needs vLLM-Omni, which takes a while

        adapter = WorkflowAdapter.load(args.workflow, args.ranks)
        args.model, components = args.model or adapter.checkpoint, adapter.workflows.components({})
    elif args.model is None:
        raise ValueError("a MODEL is needed, or a --workflow")
    if args.model.startswith(("/", ".", "~")) and not Path(args.model).expanduser().is_dir():
        raise ValueError(f"there is no checkpoint directory {args.model}")
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
    if not 1 <= args.min_sp <= args.ranks:
        raise ValueError(f"--min-sp must be from 1 to the number of ranks, {args.ranks}, got {args.min_sp}")
    if args.shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout must not be negative, got {args.shutdown_timeout}")
    policy_args = parse_pairs("--policy-arg", args.policy_arg)
    refuse_stage_overrides(args.passthrough)
    settings: dict[str, Any] = {"policy": args.policy, "policy_args": policy_args, "admission": args.admission}
    settings |= {"run_ahead": args.run_ahead, "ring": args.ring, "min_sp": args.min_sp}
    settings["shutdown_timeout_s"] = args.shutdown_timeout
    if args.workflow:
        settings["workflows"] = [str(Path(path).resolve()) for path in args.workflow]
    if args.model_name:
        settings["model_name"] = args.model_name
    if args.costs is not None:
        check_costs(args.costs, Settings(model_name=args.model_name).name_of(args.model))
    if args.comm_table is not None:
        check_comm_table(args.comm_table)
    for name in ("costs", "timeline", "record", "comm_table"):
        if (path := getattr(args, name)) is not None:
            settings[name] = str(path.resolve())
    endpoint, passthrough = take_otlp_endpoint(args.otlp_endpoint, args.passthrough)
    if endpoint is not None:
        settings["otlp_endpoint"] = endpoint
    settings |= parse_settings(args.set)
    checked = Settings.parse({"gfdit": settings})
    check_components(components, args.ranks, checked.component_bytes)
    stage = {
        "engine_backend": ENGINE,
        "additional_config": {"gfdit": settings},
        "parallel_config": {"data_parallel_size": args.ranks},
    }
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise ModuleNotFoundError(f"vLLM is not installed beside {sys.executable}", name="vllm")
    command = [str(program), "serve", args.model, "--omni", "--port", str(args.port)]
    command += ["--stage-overrides", json.dumps({"0": stage})]
    return [*command, "--middleware", FRONT, *passthrough]


def check_components(components: Iterable[Component], num_ranks: int, component_bytes: int | None) -> None:
    """Raises ValueError for one that no rank can have, by its bytes or because there is no such rank."""
    held = Residency(components, component_bytes)
    for one in held.table.values():
        if not any(one.may_be_on(rank) for rank in range(num_ranks)):
            raise ValueError(f"component {one.name} may be on ranks {one.ranks}, and there are {num_ranks}")


def check_costs(path: Path, model: str) -> None:
    """Raises ValueError for a cost table that is wrong or knows nothing of the model."""
    known = dict.fromkeys(entry.model for entry in CostTable.load(path).entries)
    if model not in known:
        raise ValueError(f"{path} has no times of {model!r}, known: {', '.join(known)}; see --model-name")


def check_comm_table(path: Path) -> None:
    """Raises ValueError or OSError for a table that cannot be used."""
    from gfdit.comm.selector_table import SelectorTable  # needs torch, which takes seconds to import

    SelectorTable.load(path)


def refuse_stage_overrides(passthrough: list[str]) -> None:
    """Raises ValueError for vLLM-Omni's option that would replace ours, and with it the engine."""
    for argument in passthrough:
        name = argument.partition("=")[0].replace("_", "-")  # vLLM takes either
        if len(name) > len("--stage-") and "--stage-overrides".startswith(name):  # and any unique beginning
            raise ValueError(
                f"{argument.partition('=')[0]} would replace the one that selects gfdit's engine; "
                "use --set NAME=VALUE for its settings, or `vllm serve` by hand (docs/serving.md)"
            )


def take_otlp_endpoint(own: str | None, passthrough: list[str]) -> tuple[str | None, list[str]]:
    """vLLM's --otlp-traces-endpoint, which keeps vLLM-Omni from starting, as gfdit's; and what is left for vLLM.

    Raises ValueError where both are given, or vLLM's without a value.
    """
    found, rest, items = own, [], iter(passthrough)
    for argument in items:
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") != "--otlp-traces-endpoint":
            rest.append(argument)
            continue
        if found is not None:
            raise ValueError(f"{name} and --otlp-endpoint are two names of one option here, give it once")
        found = value if equals else next(items, "")
        if not found or found.startswith("-"):
            raise ValueError(f"{name} takes a URL")
    return found, rest


def parse_settings(items: list[str]) -> dict[str, Any]:
    """NAME=VALUE items as settings of their types. Raises ValueError for one that cannot be set here."""
    types = get_type_hints(Settings, include_extras=True)
    parsed: dict[str, Any] = {}
    for name, value in parse_pairs("--set", items).items():
        if name in _OPTIONS:
            raise ValueError(f"--set {name}: use {_OPTIONS[name]}")
        if name not in types:
            known = ", ".join(known for known in types if known not in _OPTIONS)
            raise ValueError(f"--set knows no setting {name!r}, known: {known}")
        try:
            parsed[name] = msgspec.convert(value, types[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"--set {name}={value}: {str(error).replace('`', '')}") from error
    return parsed
