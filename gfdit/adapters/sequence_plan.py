"""How the tokens of a transformer are split, where vLLM-Omni has no plan, or one that asks for even lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelInput

#: The key of the split length in vLLM-Omni's forward context. A plan splits one sequence.
SHARD_GROUP = "gfdit"


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Which tensors are split where, and where tokens come together again.

    ``splits`` has the form of vLLM-Omni's ``_sp_plan``, whose hooks carry it out: by module, inputs by name or
    outputs by index. ``gather`` names the module whose output, (rows, tokens, ...), is made whole.
    """

    splits: Mapping[str, Mapping[str | int, SequenceParallelInput]]
    gather: str


def split(dim: int, num_dims: int, *, output: bool = False) -> SequenceParallelInput:
    """Split dimension ``dim`` of a module's input, or ``output``, that has ``num_dims`` dimensions.

    It is padded if need be, so any length goes with any degree.
    """
    return SequenceParallelInput(
        split_dim=dim, expected_dims=num_dims, split_output=output, auto_pad=True, shard_group=SHARD_GROUP
    )
