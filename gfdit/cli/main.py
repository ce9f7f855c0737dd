"""The `gfdit` command: one module per sub-command, imported only when it is used.

A module provides `configure(parser)` and `run(args) -> exit status`. A ValueError or OSError that leaves it
is the user's mistake: one line on stderr, exit status 2. What follows a bare `--` arrives in
`args.passthrough`.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

USAGE_ERROR = 2
INTERRUPTED = 130  # as a shell says of a process that SIGINT ended
# Which extra of pyproject.toml brings a module that the base installation lacks.
EXTRAS = {"matplotlib": "sim", "scipy": "sim", "tqdm": "sim", "rich": "top", "httpx": "demo", "PIL": "demo"}
# What comes with vLLM, which no extra installs: it has to suit the machine.
SERVER_MODULES = ("torch", "triton", "vllm", "vllm_omni", "diffusers", "transformers", "safetensors", "tokenizers")
INSTALL_SERVER = "install vLLM 0.30 as the machine needs it, then: pip install 'gfdit[omni]'"


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    summary: str
    takes_passthrough: bool = False


COMMANDS = {
    "tiny-model": Command("gfdit.cli.tiny_model", "write a small random checkpoint that runs on a CPU"),
    "serve": Command(
        "gfdit.cli.serve",
        "serve a model with a policy that schedules every denoising step",
        takes_passthrough=True,
    ),
    "top": Command("gfdit.cli.top", "watch a running server: ranks, requests, deadlines, faults"),
    "agent": Command("gfdit.cli.agent", "tell HAProxy how much of the traffic a server should get"),
    "admin": Command(
        "gfdit.cli.admin", "change a running server: policy, costs, limits, files; drain or add ranks, drain it"
    ),
    "sim": Command("gfdit.cli.sim", "run a trace through a policy under a virtual clock, without a GPU"),
    "sweep": Command("gfdit.cli.sweep", "compare policies over workloads, loads, deadlines and seeds"),
    "plan": Command("gfdit.cli.plan", "find the fewest ranks that meet a target on a trace or workload"),
    "workload": Command("gfdit.cli.workload", "write a trace of a known arrival pattern at a chosen load"),
    "profile": Command(
        "gfdit.cli.profile", "measure a model's task times on a real server", takes_passthrough=True
    ),
    "models": Command("gfdit.cli.models", "list the pipelines of vLLM-Omni and how gfdit schedules each"),
    "compatibility": Command("gfdit.cli.compatibility", "check what gfdit uses of vLLM-Omni against a release"),
    "workflows": Command(
        "gfdit.cli.workflows", "list the workflows in a file: nodes, components, bytes; draw them"
    ),
    "policies": Command("gfdit.cli.policies", "list the scheduling policies and their arguments"),
    "bench": Command("gfdit.cli.bench", "measure serving, collectives, control plane or migration"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0 if args else USAGE_ERROR
    name = args[0]
    if name not in COMMANDS:
        return _fail("gfdit", f"unknown command {name!r}; allowed: {', '.join(COMMANDS)}")
    prog = f"gfdit {name}"
    try:
        module = importlib.import_module(COMMANDS[name].module)
        own, passthrough = _split(args[1:])
        if passthrough and not COMMANDS[name].takes_passthrough:
            raise ValueError(f"takes nothing after --, got: {' '.join(passthrough)}")
        namespace = parser_of(name).parse_args(own)
        namespace.passthrough = passthrough
        status = int(module.run(namespace))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has enough: `gfdit models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        return _fail(prog, _how_to_install((error.name or "").partition(".")[0]))
    except (ValueError, OSError) as error:
        return _fail(prog, str(error))


def parser_of(name: str) -> argparse.ArgumentParser:
    """Of a command of :data:`COMMANDS`. It raises ``ValueError`` for what it does not understand."""
    parser = _Parser(prog=f"gfdit {name}", description=COMMANDS[name].summary, allow_abbrev=False)
    importlib.import_module(COMMANDS[name].module).configure(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse, except that an error is one line and says what is allowed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Nothing unknown, so that a sub-command says itself what it allows."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            allowed = ", ".join(option for option in self._option_string_actions if option.startswith("--"))
            self.error(f"unrecognized: {' '.join(unknown)}; allowed: {allowed}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """argparse itself would hand what follows `--` to the command's own positional arguments."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end + 1 :]


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: gfdit COMMAND [options]   (gfdit COMMAND --help)", "", *lines])


def _how_to_install(module: str) -> str:
    """One line for the module that an import lacked."""
    if module in EXTRAS:
        return f"needs {module}: pip install 'gfdit[{EXTRAS[module]}]'"
    if module in SERVER_MODULES:
        return f"needs {module}: {INSTALL_SERVER}"
    return f"needs {module}, which is not installed"


def _fail(prog: str, message: str) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR
