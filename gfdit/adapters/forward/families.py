"""What no look at a loaded pipeline tells: how tokens are split, names that are its own, what cannot be cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gfdit.adapters.sequence_plan import SequencePlan, Split
from gfdit.core.tasks import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Of one pipeline class. Most need none: names are vLLM-Omni's, and the transformer has a ``_sp_plan``."""

    #: Where the transformer has no plan of its own, or one that asks for even lengths.
    sequence_plan: SequencePlan | None = None
    #: Denoising models, as paths from the pipeline, where they are not called as elsewhere.
    denoisers: tuple[str, ...] | None = None
    #: Where the pipeline keeps its models, if that is not on itself.
    root: str = ""
    #: Steps of the two requests that are tried at start; some models take no other number.
    trial_steps: tuple[int, int] = (4, 3)
    #: Of a request that does not say.
    default_shape: Shape = field(default=Shape(1024, 1024))
    #: Why requests run whole, if it is known that no cut can be right.
    whole: str = ""


# Positions make the rotary embeddings, text before image: splitting those of the image splits them.
_TOKENS_AND_IDS = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")
_IDS = Family(sequence_plan=_TOKENS_AND_IDS)
_VIDEO = Family(default_shape=Shape(480, 832, 81))
_CACHES = "it keeps the attention cache of a request in the model"
_WRITES_TEXT = "it makes its output token by token"
_ACTION = "it makes a short action of a robot, too quick to be cut"
_AUDIO_IN_PLACE = "it makes audio, and its steps change their input in place"

#: By the ``_class_name`` of a checkpoint's ``model_index.json``.
FAMILIES: dict[str, Family] = {
    "FluxPipeline": _IDS,
    "FluxDMD2Pipeline": _IDS,
    "FluxKontextPipeline": _IDS,
    "LongCatImageEditPipeline": _IDS,
    "LongCatImagePipeline": _IDS,
    "OvisImagePipeline": _IDS,
    "StableDiffusion3Pipeline": Family(
        sequence_plan=SequencePlan({"pos_embed": {0: Split(1, 3, output=True)}}, gather="proj_out")
    ),
    "DiffusersAdapterPipeline": Family(root="_pipeline"),
    "LTX2DistilledOneStagePipeline": Family(trial_steps=(8, 8)),
    "LTX2DistilledTwoStagePipeline": Family(trial_steps=(8, 8)),
    "LTX2DistilledPipeline": Family(trial_steps=(8, 8)),
    "HeliosPipeline": Family(default_shape=Shape(384, 640, 132)),
    "HeliosPyramidPipeline": Family(default_shape=Shape(384, 640, 132)),
    "WanPipeline": _VIDEO,
    "WanDMDPipeline": _VIDEO,
    "WanVACEPipeline": _VIDEO,
    "WanImageToVideoPipeline": _VIDEO,
    "WanT2VDMD2Pipeline": _VIDEO,
    "WanI2VDMD2Pipeline": _VIDEO,
    "HunyuanVideo15Pipeline": Family(default_shape=Shape(480, 832, 121)),
    "HunyuanVideo15ImageToVideoPipeline": Family(default_shape=Shape(480, 832, 121)),
    "BagelPipeline": Family(whole=_CACHES),
    "DreamZeroPipeline": Family(whole=_CACHES),
    "Gr00tN1d7Pipeline": Family(whole=_ACTION),
    "HunyuanImage3ForCausalMM": Family(whole=_CACHES),
    "InternVLAA1Pipeline": Family(whole=_ACTION),
    "LancePipeline": Family(whole=_CACHES),
    "LingBotWorldCausalDMDPipeline": Family(whole=_CACHES),
    "Magi2Pipeline": Family(whole=_CACHES),
    "NextStep11Pipeline": Family(whole=_WRITES_TEXT),
    "OmniVoice": Family(whole=_AUDIO_IN_PLACE),
    "OmniVoicePipeline": Family(whole=_AUDIO_IN_PLACE),
    "Pi05Pipeline": Family(whole=_ACTION),
    "Pi0Pipeline": Family(whole=_ACTION),
    "SenseNovaU1Pipeline": Family(whole=_CACHES),
}
#: Whose transformers' own plans for splitting tokens were shown to make one rank's images, or at least stock's.
EXACT_PLANS = frozenset(
    {
        "ErnieImagePipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "GlmImagePipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "HunyuanVideo15Pipeline",
        "OmniGen2Pipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImageLayeredPipeline",
        "QwenImagePipeline",
        "WanDMDPipeline",
        "WanImageToVideoPipeline",
        "WanPipeline",
        "WanVACEPipeline",
    }
)


def family_of(od_config: Any) -> Family:
    """Of vLLM-Omni's ``OmniDiffusionConfig``; whatever diffusers runs is one family.

    With a step cache more steps are tried, since caches skip none of the first.
    """
    by_diffusers = od_config.diffusion_load_format == "diffusers"
    name = "DiffusersAdapterPipeline" if by_diffusers else str(od_config.model_class_name)
    family = FAMILIES.get(name, Family())
    if od_config.cache_backend not in (None, "none") and family.trial_steps == Family().trial_steps:
        return replace(family, trial_steps=(12, 11))
    return family
