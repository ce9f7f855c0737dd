"""What no look at a loaded pipeline tells: how tokens are split, names that are its own, what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gfdit.adapters.forward import helios, z_image
from gfdit.adapters.forward.known import Look, Sizes, scale_above, sd3_sizes, sized, true_cfg, unknown, wan
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
    #: Of these requests, where vLLM-Omni's own for warming up would tell less.
    trial_frames: int | None = None
    #: Whether requests may bring an image, of a pipeline that does not say so.
    trial_image: bool = False
    #: Of a request that does not say.
    default_shape: Shape = field(default=Shape(1024, 1024))
    #: What can be said of a request before the model is loaded, and which it cannot take.
    look: Look = unknown
    #: Whether a pass of the denoising models does the same at every step, but for the tensors it is given.
    captures_steps: bool = False
    #: Arguments of denoisers that may be None where they let everything through: no mask is none to read back.
    masks: tuple[str, ...] = ()
    #: Those that forward leaves on the host, for the model to send to the device at every step.
    sent: tuple[str, ...] = ()
    #: Whether both branches of guidance are rows of one call, which :attr:`alter` has split among ranks.
    splits_rows: bool = False
    #: To which the denoiser pads each of the texts in a list.
    text_multiple: int = 1
    #: Whether :mod:`~gfdit.adapters.forward.inpainting` fits what ``forward`` calls.
    inpaints: bool = False
    #: So many times its tokens are in a pass of the denoiser, if it is made to inpaint.
    templates_per_pass: int = 1
    #: Whether ``forward`` reads masks by itself.
    reads_masks: bool = False
    #: Changes the loaded pipeline, or raises ``ValueError`` for one that cannot be driven.
    alter: Callable[[Any], None] | None = None
    #: Why requests run whole, if it is known that no cut can be right.
    whole: str = ""


# Positions make the rotary embeddings, text before image: splitting those of the image splits them.
_TOKENS_AND_IDS = SequencePlan({"": {"hidden_states": Split(1, 3), "img_ids": Split(0, 2)}}, gather="proj_out")
_IDS = Family(sequence_plan=_TOKENS_AND_IDS)
_VIDEO = Family(default_shape=Shape(480, 832, 81))
_HELIOS = Family(
    default_shape=Shape(384, 640, 132), look=helios.look, trial_frames=helios.WINDOW + 1, sent=helios.INDICES
)
_QWEN_MASKS = ("encoder_hidden_states_mask",)
# Rotary embeddings exist for 4096 positions on either side of the centre.
_QWEN_SIZES = Sizes(smallest=1, longest=(131072, 131072))
_QWEN = Family(look=sized(_QWEN_SIZES, true_cfg(4.0)), captures_steps=True, masks=_QWEN_MASKS)
_QWEN_INPAINTS = replace(_QWEN, inpaints=True)


def _refuse_gates(pipeline: Any) -> None:
    if any(getattr(module, "to_gate_compress", None) is not None for module in pipeline.modules()):
        raise ValueError("gfdit does not support gated video sparse attention (FASTVIDEO_VSA); choose another")


def _wan(default_guidance_scale: float) -> Family:
    return Family(
        default_shape=_VIDEO.default_shape,
        look=wan(default_guidance_scale),
        trial_image=True,
        captures_steps=True,
        alter=_refuse_gates,
    )


_CACHES = "it keeps the attention cache of a request in the model"
_WRITES_TEXT = "it makes its output token by token"
_ACTION = "it makes a short action of a robot, too quick to be cut"
_AUDIO_IN_PLACE = "it makes audio, and its steps change their input in place"

#: By the ``_class_name`` of a checkpoint's ``model_index.json``.
FAMILIES: dict[str, Family] = {
    "FluxPipeline": Family(
        sequence_plan=_TOKENS_AND_IDS,
        look=sized(Sizes(), true_cfg(1.0), 512),
        captures_steps=True,
        sent=("guidance",),
        inpaints=True,
    ),
    "Flux2KleinPipeline": Family(reads_masks=True),
    "FluxDMD2Pipeline": _IDS,
    "FluxKontextPipeline": _IDS,
    "LongCatImageEditPipeline": _IDS,
    "LongCatImagePipeline": Family(
        sequence_plan=_TOKENS_AND_IDS, look=sized(Sizes(), scale_above(1.0)), captures_steps=True
    ),
    "OvisImagePipeline": _IDS,
    "QwenImageEditPipeline": replace(_QWEN_INPAINTS, templates_per_pass=2),
    # Its preprocessing lets a request without an image pass.
    "QwenImageEditPlusPipeline": replace(_QWEN, look=sized(_QWEN_SIZES, true_cfg(4.0), needs_image=True)),
    "QwenImagePipeline": _QWEN_INPAINTS,
    "StableDiffusion3Pipeline": Family(
        sequence_plan=SequencePlan({"pos_embed": {0: Split(1, 3, output=True)}}, gather="proj_out"),
        look=sized(sd3_sizes, scale_above(1.0), 512),
        captures_steps=True,
        inpaints=True,
    ),
    "ZImagePipeline": Family(
        sequence_plan=z_image.SEQUENCE_PLAN,
        look=sized(z_image.sizes, scale_above(0.0), z_image.max_text_tokens),
        trial_image=True,
        captures_steps=True,
        splits_rows=True,
        text_multiple=z_image.CAPTION_MULTIPLE,
        alter=z_image.split_rows,
    ),
    "DiffusersAdapterPipeline": Family(root="_pipeline"),
    "LTX2DistilledOneStagePipeline": Family(trial_steps=(8, 8)),
    "LTX2DistilledTwoStagePipeline": Family(trial_steps=(8, 8)),
    "LTX2DistilledPipeline": Family(trial_steps=(8, 8)),
    "HeliosPipeline": _HELIOS,
    "HeliosPyramidPipeline": _HELIOS,
    "WanPipeline": _wan(4.0),
    "WanDMDPipeline": _wan(1.0),
    "WanVACEPipeline": replace(_VIDEO, reads_masks=True),
    "WanImageToVideoPipeline": _wan(5.0),
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
        "HeliosPipeline",
        "HeliosPyramidPipeline",
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
