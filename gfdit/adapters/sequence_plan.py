"""How the tokens of a transformer are split, where vLLM-Omni has no plan, or one that asks for even lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelInput

#: The key of the split length in vLLM-Omni's forward context. A plan splits one sequence.
SHARD_GROUP = "gfdit"
#: The same where vLLM-Omni's own plan splits: of the first sequence that is padded, else of the last one.
LAST_SPLIT = "gfdit last split"


class Split(NamedTuple):
    """Of a module's input, or ``output``, with ``num_dims`` dimensions: ``dim`` is split.

    It is padded if need be, so any length goes with any degree.
    """

    dim: int
    num_dims: int
    output: bool = False


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Which tensors are split where, and where tokens come together again.

    ``parts`` are, by module, inputs by name or outputs by index. ``gather`` names the module whose output,
    (rows, tokens, ...), is made whole.
    """

    parts: Mapping[str, Mapping[str | int, Split]]
    gather: str

    @property
    def splits(self) -> dict[str, dict[str | int, SequenceParallelInput]]:
        """In the form of vLLM-Omni's ``_sp_plan``, whose hooks carry it out."""
        from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelInput

        def of(split: Split) -> SequenceParallelInput:
            return SequenceParallelInput(
                split_dim=split.dim,
                expected_dims=split.num_dims,
                split_output=split.output,
                auto_pad=True,
                shard_group=SHARD_GROUP,
            )

        return {
            module: {name: of(split) for name, split in tensors.items()} for module, tensors in self.parts.items()
        }
