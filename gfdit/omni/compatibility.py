"""Refuses, before anything starts, what cannot be elastic or is another vLLM-Omni, and says why."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import multiprocessing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from gfdit.omni.sources import Function, Sources, own_members, parameters_in
from gfdit.omni.vllm_symbols import MEMBERS, SYMBOLS, VERSION

_THIS = f"this vLLM-Omni (gfdit needs {VERSION})"
_MODELS = "vllm_omni.diffusion.models."

_REPLICA_PROCESS = "StageDiffusionProc"  # as vllm_omni.diffusion.stage_diffusion_proc names it

_SHARDED = "its weights would be sharded at load, and every rank must be able to run any task"
_STATIC = "gfdit chooses it for every task; leave it at 1"
_OFFLOAD = "moving weights during a forward pass does not go with a full replica per rank"

Table = Mapping[str, Mapping[str, str | None]]


def check_symbols(symbols: Table = SYMBOLS, members: Table = MEMBERS) -> None:
    """Raise ``ImportError`` naming the first thing that this vLLM-Omni lacks, or has with other parameters.

    A method that is overridden and has another name there would never be called, without a word.
    """
    for fault in _faults(symbols, members, _Imported(), _THIS):
        raise ImportError(fault)


def faults_of(sources: Sources, symbols: Table = SYMBOLS, members: Table = MEMBERS) -> list[str]:
    """A line for each thing that the vLLM and vLLM-Omni in ``sources`` lack, or have with other parameters."""
    return list(_faults(symbols, members, _Read(sources), "it"))


def parameters_of(member: Any) -> str | None:
    """A function's parameters, with ``=`` behind those that have a default; None for what is no function."""
    member = getattr(member, "__func__", member)
    if not inspect.isfunction(member):
        return None
    said, star = [], False
    for parameter in inspect.signature(member).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            said.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)  # with its stars
        said.append(f"{bare}" if parameter.default is parameter.empty else f"{bare}=")
    return ", ".join(said)


class _Symbols(Protocol):
    """Of some vLLM-Omni. Parameters are None for what is no function, or if nobody can tell."""

    def has_module(self, module: str) -> bool: ...

    def parameters(self, module: str, name: str) -> str | None:
        """Raises ``LookupError`` if there is nothing of that name; it may be of an attribute."""
        ...

    def own(self, module: str, cls: str) -> Mapping[str, str | None]:
        """Parameters by member of a class, without those of its bases."""
        ...


def _faults(symbols: Table, members: Table, there: _Symbols, what: str) -> Iterator[str]:
    for module, names in symbols.items():
        if not there.has_module(module):
            yield f"gfdit needs {module}, which {what} does not have"
            continue
        for name, wanted in names.items():
            try:
                found = there.parameters(module, name)
            except LookupError:
                yield f"gfdit needs {module}.{name}, which {what} does not have"
                continue
            if wanted is not None and found is not None and not _can_be_called(wanted, found):
                yield f"gfdit calls {module}.{name}({wanted}), which takes ({found}) in {what}"
    for place, wanted_of in members.items():
        module, _, cls = place.partition(":")
        own = there.own(module, cls) if there.has_module(module) else {}
        for name, wanted in wanted_of.items():
            full = f"{module}.{cls}.{name}"
            if name not in own and (wanted is not None or not _has(there, module, f"{cls}.{name}")):
                yield f"gfdit builds on {full}, which {what} does not have"
            elif wanted is not None and own[name] != wanted:
                yield f"gfdit overrides {full}({wanted}), which takes ({own[name]}) in {what}"


def _has(there: _Symbols, module: str, name: str) -> bool:
    try:
        there.parameters(module, name)
    except LookupError:
        return False
    return True


def _can_be_called(wanted: str, found: str) -> bool:
    """Whether a function that takes ``found`` takes all that one with ``wanted`` does, and needs nothing else."""
    offered = found.split(", ")
    taken = {name.rstrip("=") for name in wanted.split(", ")} - {"", "*"}
    needed = {name for name in offered if not name.endswith("=") and not name.startswith("*")} - {""}
    return taken <= {name.rstrip("=") for name in offered} and needed <= taken


class _Read:
    """By its source."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def has_module(self, module: str) -> bool:
        return self._sources.tree(module) is not None

    def parameters(self, module: str, name: str) -> str | None:
        if (found := self._sources.find(module, name)) is None:
            raise LookupError(name)
        return parameters_in(found.node) if isinstance(found.node, Function) else None

    def own(self, module: str, cls: str) -> Mapping[str, str | None]:
        found = self._sources.find(module, cls)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return {}
        return {
            name: parameters_in(node) if isinstance(node, Function) else None
            for name, node in own_members(found.node).items()
        }


class _Imported:
    """Of the one that runs. Models are read: a server needs one of all."""

    def __init__(self) -> None:
        self._models = _Read(installed_sources())

    def has_module(self, module: str) -> bool:
        if module.startswith(_MODELS):
            return self._models.has_module(module)
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # nor the package that it was in
            return False

    def parameters(self, module: str, name: str) -> str | None:
        if module.startswith(_MODELS):
            return self._models.parameters(module, name)
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(target, part):
                raise LookupError(name)
            target = getattr(target, part)
        return parameters_of(target)

    def own(self, module: str, cls: str) -> Mapping[str, str | None]:
        if module.startswith(_MODELS):
            return self._models.own(module, cls)
        found = getattr(importlib.import_module(module), cls, None)
        return {} if found is None else {name: parameters_of(member) for name, member in vars(found).items()}


def installed_sources(*first: Path) -> Sources:
    """Of the vLLM and vLLM-Omni that are installed, where ``first`` have none. Raises ``ValueError`` without."""
    places = list(first)
    for package in ("vllm_omni", "vllm"):
        if Sources(*places).place_of(package) is None:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                raise ValueError(f"needs {package}: install vLLM 0.30, then pip install 'gfdit[omni]'")
            places.append(Path(spec.origin).parent.parent)
    return Sources(*places)


def check_process() -> None:
    """Raise ``ValueError`` in a process that vLLM-Omni has started for one replica of several behind one server.

    When such a replica is lost, vLLM-Omni 0.30 goes on sending to it: the whole server stands still while
    ``/health`` says 200. Nor do replicas drain there, and ``/metrics`` and ``/v1/gfdit/`` know nothing of them.
    """
    if multiprocessing.current_process().name == _REPLICA_PROCESS:
        raise ValueError(
            "gfdit takes one engine per server, in the server's own process: with several replicas behind one "
            "server (--omni-dp-size-local, --headless, --stage-id) the loss of one would freeze them all; run "
            "`gfdit serve` on every node and a router in front (docs/fleet.md)"
        )


def check_config(od_config: Any) -> None:
    """Raise ``ValueError`` naming a setting of ``OmniDiffusionConfig`` that gfdit cannot work with, and why."""
    parallel = od_config.parallel_config
    refused = (
        ("tensor_parallel_size", parallel.tensor_parallel_size > 1, _SHARDED),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, _SHARDED),
        ("use_hsdp", parallel.use_hsdp, _SHARDED),
        ("enable_expert_parallel", parallel.enable_expert_parallel, _SHARDED),
        ("text_encoder_tp_size", parallel.text_encoder_tp_size > 1, _SHARDED),
        ("ulysses_degree", parallel.ulysses_degree > 1, _STATIC),
        ("ring_degree", parallel.ring_degree > 1, _STATIC),
        ("allgather_degree", parallel.allgather_degree > 1, _STATIC),
        ("cfg_parallel_size", parallel.cfg_parallel_size > 1, _STATIC),
        ("vae_patch_parallel_size", parallel.vae_patch_parallel_size > 1, _STATIC),
        ("ulysses_mode", parallel.ulysses_mode != "strict", "only 'strict' is supported"),
        ("enable_cpu_offload", od_config.enable_cpu_offload, _OFFLOAD),
        ("enable_layerwise_offload", od_config.enable_layerwise_offload, _OFFLOAD),
        (
            "enable_distributed_layerwise_offload",
            getattr(od_config, "enable_distributed_layerwise_offload", False),
            _OFFLOAD,
        ),
        (
            "cache_backend",
            od_config.cache_backend not in (None, "none", "tea_cache", "cache_dit"),
            "of step caches only 'tea_cache' and 'cache_dit' keep their state where it can follow a request",
        ),
        (
            "diffusion_kv_cache_skip_steps",
            bool(od_config.diffusion_kv_cache_skip_steps),
            "steps run one by one, and attention is not told which one it is part of",
        ),
        (
            "streaming_output",
            od_config.streaming_output,
            "chunks of one request cannot leave before its end yet",
        ),
        (
            "diffusion_compile_granularity",
            not od_config.enforce_eager and od_config.diffusion_compile_granularity == "full",
            "a graph of the whole model would contain the collectives of one degree; use 'regional'",
        ),
    )
    for name, wrong, reason in refused:
        if wrong:
            raise ValueError(f"gfdit does not support {name}: {reason}")
    mode = getattr(od_config.diffusion_kv_mode, "value", od_config.diffusion_kv_mode)
    if mode != "dense_legacy":
        raise ValueError(f"gfdit does not support diffusion_kv_mode {mode!r}, only 'dense_legacy'")
