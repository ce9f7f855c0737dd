"""Refuses, before anything starts, what cannot be elastic, and says why."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gfdit.omni.vllm_symbols import MEMBERS, SYMBOLS

_THIS = "this vLLM-Omni (gfdit needs 0.30)"
_MODELS = "vllm_omni.diffusion.models."

_SHARDED = "its weights would be sharded at load, and every rank must be able to run any task"
_STATIC = "gfdit chooses it for every task; leave it at 1"
_OFFLOAD = "moving weights during a forward pass does not go with a full replica per rank"


def check_symbols(
    symbols: Mapping[str, Sequence[str]] = SYMBOLS,
    members: Mapping[str, Mapping[str, str | None]] = MEMBERS,
) -> None:
    """Raise ``ImportError`` naming the first thing that this vLLM-Omni lacks, or has with other parameters.

    A method that is overridden and has another name there would never be called, without a word.
    """
    for module, names in symbols.items():
        for name in names:
            if not _has(module, name):
                raise ImportError(f"gfdit needs {module}.{name}, which {_THIS} does not have")
    for place, wanted in members.items():
        module, _, cls = place.partition(":")
        for name, parameters in wanted.items():
            what = f"{module}.{cls}.{name}"
            there = _parameters_in(module, cls)
            if name not in there and not (parameters is None and _has(module, f"{cls}.{name}")):
                raise ImportError(f"gfdit builds on {what}, which {_THIS} does not have")
            if parameters is not None and there[name] != parameters:
                raise ImportError(f"gfdit overrides {what}({parameters}), which takes ({there[name]}) in {_THIS}")


def parameters_of(member: Any) -> str | None:
    """Names of a method's parameters; None for what is no method."""
    member = getattr(member, "__func__", member)
    return ", ".join(inspect.signature(member).parameters) if inspect.isfunction(member) else None


def _has(module: str, name: str) -> bool:
    """``name`` may be of an attribute, which a model has somewhere in its module."""
    parts = name.split(".")
    if module.startswith(_MODELS):
        return _names_in(module).issuperset(parts)
    target = importlib.import_module(module)
    for part in parts:
        if not hasattr(target, part):
            return False
        target = getattr(target, part)
    return True


@functools.cache
def _names_in(module: str) -> set[str]:
    """Of the code of a model."""
    names = set()
    for node in ast.walk(_source_of(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
    return names


def _parameters_in(module: str, cls: str) -> dict[str, str | None]:
    """By member of a class."""
    if not module.startswith(_MODELS):
        found = getattr(importlib.import_module(module), cls, None)
        return {} if found is None else {name: parameters_of(member) for name, member in vars(found).items()}
    members: dict[str, str | None] = {}
    for node in _source_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    given = method.args
                    names = [
                        arg.arg
                        for arg in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
                        if arg
                    ]
                    members[method.name] = ", ".join(names)
    return members


@functools.cache
def _source_of(module: str) -> ast.Module:
    """A model's code, which is not imported: a server needs one of all."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"gfdit needs {module}, which {_THIS} does not have")
    return ast.parse(Path(spec.origin).read_text())


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
