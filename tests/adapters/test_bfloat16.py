"""Every family in bfloat16, weights and all: as near to stock as stock's own static degrees are.

``pytest tests/adapters/test_bfloat16.py -m thorough -rP`` prints the figures that docs/models/bfloat16.md has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gfdit.adapters.testing import AdapterKit, ForkServer, KitRequest, check_adapter
from tests.adapters import sabotage
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.thorough

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 4, 3), dtype=np.uint8)).resize((96, 64))
# Six steps: as many as there are layouts to go through. Guided, so that branches can be apart.
GUIDED: dict[str, Any] = {"steps": 6, "negative_prompt": "blurry", "guidance_scale": 4.0, "true_cfg_scale": 4.0}
UNREWRITTEN = {"extra_args": {"enable_prompt_rewrite": False}}


def image(height: int, width: int, **more: Any) -> KitRequest:
    return KitRequest(height, width, **GUIDED, **more)


def video(height: int, width: int, num_frames: int = 9, **more: Any) -> KitRequest:
    sampling = {"extra_args": {"sample_solver": "unipc", "flow_shift": 5.0}}
    more = {"max_sequence_length": 32, "sampling": sampling, **more}
    return KitRequest(height, width, num_frames, **GUIDED, **more)


#: By family, with lengths that stock can split: only Qwen-Image pads and masks what does not divide.
SPLIT_BY_STOCK = {
    "flux": [image(256, 256, max_sequence_length=32)],
    "helios": [video(64, 64, 33, sampling={})],
    "longcat-image": [image(128, 128, sampling=UNREWRITTEN)],
    "qwen-image": [image(256, 256), image(80, 112)],
    "qwen-image-edit": [image(128, 128, images=(PICTURE,)), image(96, 160, images=(PICTURE,))],
    "qwen-image-edit-plus": [image(128, 128, images=(PICTURE, PICTURE.rotate(180)))],
    "sd3": [image(256, 256, max_sequence_length=32)],
    "wan2.2-i2v": [video(64, 64, images=(PICTURE,))],
    "wan2.2-t2v-a14b": [video(64, 64)],
    "wan2.2-ti2v": [video(128, 128)],
    "z-image": [image(256, 256, max_sequence_length=128)],
}
#: With a number of tokens that is odd.
SPLIT_BY_GFDIT_ALONE = {
    "flux": image(144, 208, max_sequence_length=32),
    "sd3": image(144, 208, max_sequence_length=32),
    "wan2.2-i2v": video(48, 48, images=(PICTURE,)),
    "wan2.2-t2v-a14b": video(48, 48),
    "wan2.2-ti2v": video(96, 96),
    "z-image": image(144, 208, max_sequence_length=128),
}

#: Where stock's degrees differ at all, an error of one part in a hundred is no larger than that.
SPREAD = ("helios", "z-image")


def start(family: str, server: ForkServer, tiny_model: Callable[..., Path], *, mask: bool) -> AdapterKit:
    od_config = {"parallel_config": {"mask_sp_padding": mask}}
    model = tiny_model(family, dtype="bfloat16")
    return AdapterKit(model, dtype="bfloat16", od_config=od_config, fork_server=server, comm_timeout_s=HANG_S)


@pytest.mark.parametrize("family", SPLIT_BY_STOCK)
def test_within_the_spread_of_stock(family: str, fork_server: ForkServer, tiny_model: Callable[..., Path]) -> None:
    requests = SPLIT_BY_STOCK[family]
    # With masks stock's Wan fails at any degree but 1; here it needs none.
    with start(family, fork_server, tiny_model, mask=not family.startswith("wan")) as kit:
        report = check_adapter(kit, requests, checks=["stock", "sp1", "spread", "interleaved", "batch-spread"])
        print(f"{family}\n{report}")
        assert report.passed, str(report)
        # Negative control: the latents of a single step are a little off.
        kit.on_ranks(sabotage.scale_latents, 1, 1.05 if family in SPREAD else 1.01)
        wrong = check_adapter(kit, requests[-1:], checks=["spread"], num_scripts=1)
        print(f"sabotaged\n{wrong}")
        assert not wrong.passed and "stock's own degrees" in str(wrong), str(wrong)
        # And of a batch: a third of each request gets into the other.
        kit.on_ranks(sabotage.mix_neighbours, 1, 0.33)
        mixed = check_adapter(kit, requests[-1:], checks=["batch-spread"])
        print(f"mixed\n{mixed}")
        assert not mixed.passed and "batched" in str(mixed), str(mixed)


@pytest.mark.parametrize("family", SPLIT_BY_GFDIT_ALONE)
def test_lengths_that_stock_cannot_split(
    family: str, fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    """There is no spread to compare with, so it is the float32 kind of check with bfloat16's tolerance."""
    with start(family, fork_server, tiny_model, mask=True) as kit:
        report = check_adapter(
            kit, [SPLIT_BY_GFDIT_ALONE[family]], checks=["stock", "sp1", "layouts"], tolerance=0.01
        )
        print(f"{family}\n{report}")
        assert report.passed, str(report)
