"""No step makes the host wait for its device, in any family, but where stock does and is known to.

Without a GPU: on a CPU that stands in for one, and tells which tensors are there.
"""

from __future__ import annotations

import pytest
from PIL import Image

from gfdit.adapters.testing import KitRequest
from tests.adapters.conftest import Kits

PICTURE = Image.new("RGB", (64, 64), (90, 30, 200))
PLAIN = KitRequest(64, 64, steps=4, max_sequence_length=32)
TRUE_CFG = PLAIN.but(negative_prompt="blurry", true_cfg_scale=4.0)
GUIDED = PLAIN.but(negative_prompt="blurry", guidance_scale=4.0)
VIDEO = GUIDED.but(num_frames=5)

REQUESTS = {
    "qwen-image": TRUE_CFG,
    "qwen-image-edit": TRUE_CFG.but(images=(PICTURE,)),
    "flux": TRUE_CFG.but(guidance_scale=3.5),
    "sd3": GUIDED,
    "z-image": GUIDED.but(max_sequence_length=128, sampling={"extra_args": {"cfg_truncation": 0.3}}),
    "longcat-image": GUIDED.but(sampling={"extra_args": {"enable_prompt_rewrite": False}}),
    "helios": VIDEO,
    "wan2.2-ti2v": VIDEO,
    "wan2.2-t2v-a14b": VIDEO,
    "wan2.2-i2v": VIDEO.but(images=(PICTURE,)),
}
#: What is left to stock: places, and what waits there.
STOCK: dict[str, set[str]] = {}


@pytest.mark.parametrize("family", REQUESTS)
def test_a_step_waits_for_nothing(kits: Kits, family: str) -> None:
    kit = kits(family, num_ranks=2)
    waits = {wait for script in ("sp1@0", "sp2@0,1") for wait in kit.host_waits(REQUESTS[family], script)}
    assert waits == STOCK.get(family, set())
