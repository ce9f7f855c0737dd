"""Which way imports may point (docs/architecture.md), enforced on the source of every module."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VLLM = frozenset({"vllm", "vllm_omni"})
# core and policies decide; time, threads and sockets belong to the two drivers of the control plane.
EFFECTS = frozenset({"time", "threading", "socket", "asyncio", "multiprocessing", "subprocess", "selectors"})


@dataclass(frozen=True)
class Arrows:
    """What a package may import. `outside` None means any third-party package except vLLM."""

    ours: frozenset[str]
    outside: frozenset[str] | None
    may_import_vllm: bool = False
    forbidden_stdlib: frozenset[str] = frozenset()


def _arrows(ours: str, outside: str | None, **rest: object) -> Arrows:
    return Arrows(frozenset(ours.split()), None if outside is None else frozenset(outside.split()), **rest)  # type: ignore[arg-type]


ALL = "core policies sim comm kernels migration adapters runtime omni observe cli workflow templates"
ARROWS = {
    "__init__": _arrows("", ""),
    "core": _arrows("", "msgspec", forbidden_stdlib=EFFECTS),
    "policies": _arrows("core observe", "numpy", forbidden_stdlib=EFFECTS),
    # Read, checked and drawn where no model can be loaded; torch by name only, for the type checker.
    "workflow": _arrows("core", "numpy torch"),
    "sim": _arrows("core observe workflow", "msgspec numpy matplotlib scipy"),
    "observe": _arrows("core", "msgspec prometheus_client grpc opentelemetry"),
    "comm": _arrows("kernels", "torch triton numpy"),
    "kernels": _arrows("comm", "torch triton numpy"),
    "migration": _arrows("core comm", "torch numpy"),
    # Keys and values of templates, which any process of a host may open: no engine, no network.
    "templates": _arrows("", "torch numpy"),
    "adapters": _arrows("core comm migration workflow templates", None, may_import_vllm=True),
    # The test kit runs an adapter where it will run, so it stands on top of everything; nothing stands on it.
    "adapters.testing": _arrows(ALL, None, may_import_vllm=True),
    "runtime": _arrows("core comm migration adapters observe", None),
    "omni": _arrows(ALL, None, may_import_vllm=True),
    "cli": _arrows(ALL, None),
}
# Where packages with arrows of their own are.
PARENTS = {"gfdit", *(f"gfdit.{name.rpartition('.')[0]}" for name in ARROWS if "." in name)}


def test_every_module_keeps_to_the_arrows() -> None:
    violations = [line for path in _sources() for line in _violations(path.read_text(), _module_name(path))]
    assert not violations, "\n".join(violations)


def test_every_package_has_its_arrows() -> None:
    assert {_package(name) for name in map(_module_name, _sources())} == set(ARROWS)


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("gfdit.core.planted", "import torch", "torch"),
        ("gfdit.core.planted", "from gfdit.comm import x", "gfdit.comm"),
        ("gfdit.core.planted", "import time", "time"),
        ("gfdit.core.__init__", "from ..comm import x", "gfdit.comm"),
        ("gfdit.__init__", "from .core import Policy", "gfdit.core"),
        ("gfdit.policies.planted", "from gfdit import runtime", "gfdit.runtime"),
        ("gfdit.sim.planted", "def f():\n    import gfdit.runtime.messages", "gfdit.runtime.messages"),
        ("gfdit.comm.planted", "import msgspec", "msgspec"),
        ("gfdit.kernels.planted", "from ..core import tasks", "gfdit.core"),
        ("gfdit.runtime.planted", "from vllm_omni.diffusion import data", "vllm_omni"),
        ("gfdit.cli.planted", "import vllm", "vllm"),
        ("gfdit.adapters.planted", "from gfdit.omni import runner", "gfdit.omni"),
        ("gfdit.adapters.planted", "from gfdit.adapters import testing", "gfdit.adapters.testing"),
        ("gfdit.omni.planted", "import gfdit.adapters.testing.kit", "gfdit.adapters.testing"),
    ],
)
def test_checker_finds_a_planted_violation(module: str, source: str, told: str) -> None:
    found = list(_violations(source, module))
    assert len(found) == 1 and told in found[0] and module in found[0]


def test_checker_lets_allowed_imports_pass() -> None:
    source = "import enum\nfrom . import tasks\nfrom .tasks import x\nfrom gfdit.core.layouts import y\n"
    for module in ("gfdit.core.planted", "gfdit.core.__init__"):
        assert not list(_violations(source, module))


@pytest.mark.parametrize(
    "module",
    [
        "gfdit",
        "gfdit.core",
        "gfdit.policies",
        "gfdit.sim",
        "gfdit.workflow.compiling",
        "gfdit.cli.main",
        "gfdit.cli.serve",
    ],
)
def test_light_packages_import_without_torch_and_vllm(module: str) -> None:
    """Policies and simulator must work where neither is installed: here, where importing them is an error."""
    heavy = ["torch", "vllm", "vllm_omni", "zmq"]
    code = f"import sys\nsys.modules.update(dict.fromkeys({heavy}))\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _sources() -> Iterator[Path]:
    for folder in ("gfdit", "policies", "sim"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # gfdit/policies and gfdit/sim are links to the top-level folders.
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def _module_name(path: Path) -> str:
    """Dotted name; a package's own file keeps its `__init__`, so that relative imports resolve alike."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "gfdit" else ("gfdit", *parts))


def _package(module: str) -> str:
    """Whose arrows a module has: its top package's, or a nested one's that has its own."""
    names = module.split(".")[1:]
    nested = ".".join(names[:2])
    return nested if nested in ARROWS else names[0]


def _violations(source: str, module: str) -> Iterator[str]:
    """One line for every import that `module` may not make; imports inside functions count too."""
    own = _package(module)
    arrows = ARROWS[own]
    for line, target in _imports(source, module):
        top, *rest = target.split(".")
        if top == "gfdit":
            package = _package(target) if rest else own
            wrong = package != own and package not in arrows.ours
        elif top in VLLM:
            wrong = not arrows.may_import_vllm
        elif top in sys.stdlib_module_names:
            wrong = top in arrows.forbidden_stdlib
        else:
            wrong = arrows.outside is not None and top not in arrows.outside
        if wrong:
            yield f"{module}:{line} may not import {target}"


def _imports(source: str, module: str) -> Iterable[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [base])])
            # `from gfdit import runtime` names the package only in its list of names.
            for name in [f".{alias.name}" for alias in node.names] if base in PARENTS else [""]:
                yield node.lineno, base + name
