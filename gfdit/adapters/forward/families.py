"""What no look at a loaded pipeline tells: how a model's tokens are split, and names that are its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from gfdit.adapters.sequence_plan import SequencePlan, split
from gfdit.core.tasks import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Of one pipeline class. Most need none: names are vLLM-Omni's, and the transformer has a ``_sp_plan``."""

    #: Where the transformer has no plan of its own, or one that asks for even lengths.
    sequence_plan: SequencePlan | None = None
    #: Denoising models, as paths from the pipeline, where they are not called as elsewhere.
    denoisers: tuple[str, ...] | None = None
    #: Of a request that does not say.
    default_shape: Shape = field(default=Shape(1024, 1024))
    #: Why requests run whole, if it is known that no cut can be right.
    whole: str = ""


# Positions make the rotary embeddings, text before image: splitting those of the image splits them.
_TOKENS_AND_IDS = SequencePlan({"": {"hidden_states": split(1, 3), "img_ids": split(0, 2)}}, gather="proj_out")

#: By the ``_class_name`` of a checkpoint's ``model_index.json``.
FAMILIES: dict[str, Family] = {
    "FluxPipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "FluxDMD2Pipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "FluxKontextPipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "LongCatImagePipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "LongCatImageEditPipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "OvisImagePipeline": Family(sequence_plan=_TOKENS_AND_IDS),
    "StableDiffusion3Pipeline": Family(
        sequence_plan=SequencePlan({"pos_embed": {0: split(1, 3, output=True)}}, gather="proj_out")
    ),
    "WanPipeline": Family(default_shape=Shape(480, 832, 81)),
}
