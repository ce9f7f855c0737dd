"""How the requests of a model can be cut, where gfdit does not know: tried when a server starts, and remembered.

Every kind of request is tried on one of the ranks (:mod:`gfdit.adapters.forward.self_test`). What came out is kept
in a file, under all that it depends on: the model, how it is loaded, the device and the versions of what runs it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image
from vllm.logger import init_logger
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError

import gfdit.adapters.forward
from gfdit.adapters.forward.families import Family
from gfdit.adapters.forward.verdict import Signature, Verdict, Verdicts, signature_of

logger = init_logger(__name__)

_PACKAGES = ("vllm-omni", "vllm", "torch", "diffusers", "transformers")
#: What a client may say of guidance: sampling parameters and fields of the prompt.
_GUIDANCE: dict[str, tuple[dict[str, float], dict[str, str]]] = {
    "default": ({}, {}),
    "negative": ({"guidance_scale": 5.0, "true_cfg_scale": 4.0}, {"negative_prompt": "dummy"}),
    "scale": ({"guidance_scale": 5.0, "true_cfg_scale": 4.0}, {}),
    "off": ({"guidance_scale": 1.0, "true_cfg_scale": 1.0}, {}),
}
Pair = tuple[Signature, list[OmniDiffusionRequest]]


def pairs_to_try(
    make: Callable[..., OmniDiffusionRequest | None],
    prepare: Callable[[OmniDiffusionRequest], OmniDiffusionRequest],
    size: int,
    family: Family,
) -> list[Pair]:
    """Two requests of every signature that the model takes: they differ in width, seed and number of steps.

    ``make`` is vLLM-Omni's maker of start-up requests, ``prepare`` the model's preprocessing.
    """
    pairs = {}
    for with_image in (False, True):
        for guidance in _GUIDANCE:
            try:
                pair = [
                    prepare(_request(make, family, with_image, guidance, number, size, num_steps))
                    for number, num_steps in enumerate(family.trial_steps)
                ]
            except (ValueError, LookupError, OmniClientError):  # it wants an image, or has no use for one
                continue
            pairs[signature_of(pair[0])] = pair
    return list(pairs.items())


def _request(
    make: Callable[..., OmniDiffusionRequest | None],
    family: Family,
    with_image: bool,
    guidance: str,
    number: int,
    size: int,
    num_steps: int,
) -> OmniDiffusionRequest:
    request = make(
        height=size,
        width=size + 64 * number,
        num_inference_steps=num_steps,
        guidance_scale=1.0,
        num_frames=family.trial_frames,
    )
    if request is None:  # vLLM-Omni has no start-up request for it
        raise ValueError("no request")
    if with_image and family.trial_image:
        request.prompt["multi_modal_data"] = {"image": Image.new("RGB", (size, size), "teal")}
    given = request.prompt.get("multi_modal_data")
    if with_image and not given:
        raise ValueError("it takes no image")
    if given and not with_image:
        request.prompt.pop("multi_modal_data")
    sampling, fields = _GUIDANCE[guidance]
    request.prompt.update(fields)
    params = request.sampling_params
    params.guidance_scale, params.true_cfg_scale = 1.0, None  # what vLLM-Omni fills in where nothing is said
    for name, value in sampling.items():
        setattr(params, name, value)
    params.guidance_scale_provided = bool(sampling)
    params.seed = number
    request.request_id = f"self-test/{with_image}/{guidance}/{number}"
    return request


def learn_cuts(
    pairs: list[Pair], num_ranks: int, limit_s: float, run: Callable[[list[Pair]], list[Verdicts]]
) -> Verdicts:
    """``run`` tries some pairs, each on a rank of its own. Nothing further is begun after ``limit_s``."""
    verdicts: Verdicts = {}
    end_s = time.monotonic() + limit_s
    for first in range(0, len(pairs), num_ranks):
        some = pairs[first : first + num_ranks]
        if time.monotonic() > end_s:
            untested = Verdict(None, f"not tested within self_test_limit_s ({limit_s:g} s)")
            verdicts.update((signature, untested) for signature, _ in some)
            continue
        for of_rank in run(some):
            verdicts.update(of_rank)
    return verdicts


def say(name: str, verdicts: Verdicts) -> None:
    """One line: what is cut at its steps, and what is not and why."""
    ways: dict[str, list[str]] = {}
    for signature, verdict in verdicts.items():
        how = f"run whole, on one rank ({verdict.reason})"
        if verdict.mode is not None:
            how = f"are scheduled by {verdict.mode.cut} ({verdict.mode.keep})"
        ways.setdefault(how, []).append(str(signature))
    said = "; ".join(f"{', '.join(signatures)} {how}" for how, signatures in ways.items())
    logger.warning("requests of %s: %s; all others run whole, because they were not tested", name, said)


class RememberedCuts:
    """A file in ``folder`` for what is learnt of one model. Damaged or foreign files are as good as none."""

    def __init__(self, folder: Path, od_config: OmniDiffusionConfig) -> None:
        self._path = folder.expanduser() / f"{_key(od_config)}.json"

    def load(self) -> Verdicts | None:
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Verdict])
        except (OSError, ValueError, RecursionError):  # msgspec's errors are the second kind
            return None
        return {Signature.named(name): verdict for name, verdict in found.items()}

    def save(self, verdicts: Verdicts) -> None:
        data = msgspec.json.encode({str(signature): verdict for signature, verdict in verdicts.items()})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(self._path)
        except OSError as error:
            logger.warning("what the self-test found cannot be remembered: %s", error)


def _key(od_config: OmniDiffusionConfig) -> str:
    said: list[Any] = [str(getattr(od_config, name, None)) for name in ("model", "model_class_name", "dtype")]
    said += [od_config.enforce_eager, od_config.quantization_config, torch.__version__]
    said += [od_config.cache_backend, od_config.cache_config]
    said += [importlib.metadata.version(package) for package in _PACKAGES]
    said.append(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    digest = hashlib.sha256(repr(said).encode())
    model = Path(str(od_config.model))
    sources = sorted(Path(gfdit.adapters.forward.__path__[0]).glob("*.py"))
    for path in [model / "model_index.json", model / "transformer" / "config.json", *sources]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
