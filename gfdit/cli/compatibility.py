"""`gfdit compatibility`: what gfdit uses of vLLM-Omni, and whether a release still has it."""

import argparse
from pathlib import Path

from gfdit.omni.compatibility import faults_of, installed_sources
from gfdit.omni.vllm_symbols import MEMBERS, SYMBOLS, VERSION

_DIFFERS = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="PATH",
        type=Path,
        help="a wheel of vLLM-Omni, or a folder in which `vllm_omni` is (default: the installed one)",
    )
    parser.add_argument("--list", action="store_true", help="print what gfdit uses instead, with its parameters")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if something is missing or has other parameters. It is read only: nothing is imported."""
    if args.list:
        for line in _listed():
            print(line)
        return 0
    given = [] if args.against is None else [args.against]
    for path in given:
        _check(path)
    sources = installed_sources(*given)
    faults = faults_of(sources)
    for fault in faults:
        print(fault)
    read = ", ".join(
        f"{package} {sources.version_of(package) or 'of an unknown version'} ({sources.place_of(package)})"
        for package in ("vllm_omni", "vllm")
    )
    total = sum(map(len, SYMBOLS.values())) + sum(map(len, MEMBERS.values()))
    print(f"{len(faults)} of {total} things that gfdit uses of {VERSION} are missing or different in {read}")
    return _DIFFERS if faults else 0


def _check(path: Path) -> None:
    if path.is_file() and path.suffix != ".whl":
        raise ValueError(f"{path} is no wheel; unpack it, and name the folder in which `vllm_omni` is")
    if not path.is_file() and not (path / "vllm_omni" / "__init__.py").is_file():
        raise ValueError(f"{path} is neither a wheel nor a folder in which `vllm_omni` is")


def _listed() -> list[str]:
    lines = [f"vLLM-Omni {VERSION}"]
    for module, names in SYMBOLS.items():
        lines += [_line(f"{module}.{name}", parameters, "uses") for name, parameters in names.items()]
    for place, names in MEMBERS.items():
        cls = place.replace(":", ".")
        for name, parameters in names.items():
            lines.append(_line(f"{cls}.{name}", parameters, "builds on" if parameters is None else "overrides"))
    return lines


def _line(name: str, parameters: str | None, how: str) -> str:
    return f"{how:<10} {name}" + ("" if parameters is None else f"({parameters})")
