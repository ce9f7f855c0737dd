"""Steps whose operations were recorded once and are played again give the pictures of steps that run as ever."""

from __future__ import annotations

import pytest

from gfdit.adapters.testing import KitRequest
from tests.adapters import traced_graphs
from tests.adapters.conftest import Kits
from tests.adapters.test_compiled import on_all
from tests.support.thorough import thorough

REQUESTS = dict.fromkeys(
    ["qwen-image", "flux", "sd3", "z-image", "longcat-image"],
    KitRequest(80, 80, steps=12, negative_prompt="blurry", true_cfg_scale=4.0),
)
REQUESTS["sd3"] = REQUESTS["longcat-image"] = KitRequest(
    80, 80, steps=12, negative_prompt="blurry", guidance_scale=4.0
)
REQUESTS["wan2.2-ti2v"] = KitRequest(96, 96, 5, steps=12, negative_prompt="blurry", guidance_scale=4.0)
LAYOUTS = ("sp1@0", "sp2@0,1", "cfg2@1,0", "sp2@1,0")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen-image"),
        *thorough(f for f in REQUESTS if f != "qwen-image"),
    ],
)
def test_replayed_steps_are_the_steps(kits: Kits, family: str) -> None:
    kit, request = kits(family, num_ranks=2), REQUESTS[family]
    layouts = " ".join(LAYOUTS[step % len(LAYOUTS)] for step in range(12))
    plain = kit.run(request, layouts)
    assert all(on_all(kit, traced_graphs.capture_steps))
    assert kit.run(request, layouts).identical(plain)
    assert min(on_all(kit, traced_graphs.num_replays)) > 0
