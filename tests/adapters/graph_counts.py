"""Run on a rank by ``apply``: blocks are compiled, what was compiled is counted, and errors are planted."""

from __future__ import annotations

from typing import Any

# Traces blocks as inductor would be given them and runs them as they are: no compiler of C++, and exact.
TRACED = "aot_eager"


def compile_blocks(executor: Any, backend: str) -> int:
    """As at the start of a server without ``--enforce-eager``, but by ``backend``; returns how many blocks."""
    import torch
    from vllm_omni.diffusion.compile import regionally_compile

    from gfdit.adapters.testing.loaded_state import transformers_of
    from gfdit.omni.compiled_blocks import prepare_compiled_blocks

    torch._inductor.config.compile_threads = 1  # ranks share the cores as it is
    pipeline, runner = executor.runner.pipeline, executor.runner
    for transformer in transformers_of(pipeline):
        regionally_compile(transformer, dynamic=True, backend=backend)
    runner.num_compiled_blocks = prepare_compiled_blocks(pipeline)
    return runner.num_compiled_blocks


def rehearse_alone(executor: Any, payload: bytes) -> None:
    """As a process does that replaces another."""
    import pickle

    from gfdit.omni.rehearsal import rehearse

    rehearse(executor, pickle.loads(payload), sequence_parallel=True)


def count(executor: Any) -> tuple[int, int]:
    """Graphs and graph breaks so far."""
    return tuple(executor.gfdit_compilations().values())


def call_python_collectives(executor: Any) -> None:
    """Blocks call functions again that a compiler cannot look into."""
    import torch

    from gfdit.comm import operators

    for name in ("scatter_heads", "gather_heads"):
        setattr(operators, name, torch.compiler.disable(getattr(operators, name)))


def pass_views(executor: Any) -> None:
    """Compiled blocks get their tensors as they come."""
    from gfdit.omni import compiled_blocks

    compiled_blocks.plain = lambda value: value
