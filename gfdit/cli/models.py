"""`gfdit models`: what gfdit does with each pipeline that the installed vLLM-Omni has."""

import argparse
import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gfdit.adapters.forward.families import EXACT_PLANS, FAMILIES, Family
from gfdit.adapters.forward.proven import load as load_proven

_SPLITS_GUIDANCE = ("predict_noise_maybe_with_cfg(", "predict_noise_with_multi_branch_cfg(")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("pipelines", nargs="*", metavar="PIPELINE", help="only these class names")


def run(args: argparse.Namespace) -> int:
    """Read from vLLM-Omni's source: nothing is imported, so no GPU is needed and it takes no time."""
    rows = list(_rows())
    if unknown := sorted(set(args.pipelines) - {row.pipeline for row in rows}):
        raise ValueError(f"vLLM-Omni has no pipeline {unknown[0]!r}; all are listed by `gfdit models`")
    rows = [row for row in rows if not args.pipelines or row.pipeline in args.pipelines]
    if args.json:
        import json

        for row in rows:
            print(json.dumps({name: getattr(row, name) for name in Row.__slots__}))
        return 0
    _print(rows)
    return 0


@dataclass(frozen=True, slots=True)
class Row:
    """Of one pipeline; empty where something is not known before the model is loaded."""

    pipeline: str
    steps: str
    sequence_parallel: str
    cfg_parallel: str
    batching: str
    why_not: str


def _rows() -> Iterator[Row]:
    root = _omni_root()
    proven = load_proven().pipelines
    for name, (folder, module) in sorted(_registered(root / "registry.py").items()):
        family = FAMILIES.get(name, Family())
        if family.whole:
            yield Row(name, "whole requests", "no", "no", "no", family.whole)
            continue
        source = root / "models" / folder
        texts = [
            path.read_text() for path in [source / f"{module}.py", *source.glob("*cfg*.py")] if path.is_file()
        ]
        has_plan = any("_sp_plan" in path.read_text() for path in source.glob("*.py"))
        planned = "no"
        if family.sequence_plan:
            planned = "yes"
        elif has_plan:
            planned = "yes" if name in EXACT_PLANS else "with trust_plans"
        cfg = "yes" if any(mark in text for text in texts for mark in _SPLITS_GUIDANCE) else "no"
        how = "by its forward" if name in proven else "by its forward, tested at start"
        yield Row(name, how, planned, cfg, "yes", "")


def _registered(path: Path) -> dict[str, tuple[str, str]]:
    """Folder and module by class name, from vLLM-Omni's table."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "_DIFFUSION_MODELS" for target in targets):
            table = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return {name: (entry[0], entry[1]) for name, entry in table.items()}
    raise ValueError(f"{path} has no table of pipelines: gfdit does not know this vLLM-Omni")


def _omni_root() -> Path:
    spec = importlib.util.find_spec("vllm_omni")
    if spec is None or spec.origin is None:
        raise ValueError("needs vLLM-Omni: pip install 'gfdit[omni]'")
    return Path(spec.origin).parent / "diffusion"


def _print(rows: list[Row]) -> None:
    titles = ("pipeline", "scheduled", "SP", "CFG", "batches", "why not")
    cells = [titles, *(tuple(getattr(row, name) for name in Row.__slots__) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    cut = sum(not row.why_not for row in rows)
    version = importlib.metadata.version("vllm-omni")
    print(
        f"\n{len(rows)} pipelines of vLLM-Omni {version}: {cut} step by step, {len(rows) - cut} as whole requests."
    )
    print("A server tests a model that gfdit has not been shown when it starts, and says what it found.")
