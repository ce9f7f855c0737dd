"""Compiled blocks: one graph for each degree, whichever ranks run it in which order, and the eager pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters import graph_counts
from tests.adapters.conftest import Kits

# Of pixels between -1 and 1. Inductor fuses float32 operations, so their rounding differs.
TOLERANCE = 2e-5
QWEN = KitRequest(64, 64, steps=12, negative_prompt="blurry", true_cfg_scale=4.0)
# By family a request with guidance, and one whose tokens no degree divides.
FAMILIES = {
    "qwen-image": (QWEN, KitRequest(80, 80, steps=6, seed=2)),
    "flux": (QWEN, KitRequest(80, 80, steps=6, seed=2)),
    "wan2.2-ti2v": (
        KitRequest(64, 64, 5, steps=12, negative_prompt="blurry", guidance_scale=4.0),
        KitRequest(96, 96, 5, steps=6, seed=2, guidance_scale=1.0),
    ),
}
# A different degree or order at every step.
ON_TWO = "sp1@0 sp2@0,1 sp1@1 sp2@1,0"
ON_FOUR = "sp1@0 sp2@2,1 sp4@3,0,1,2 cfg2@1,3 sp2@0,3 cfg2xsp2@2,0,3,1 sp1@2 sp4@0,1,2,3"


def script(layouts: str, num_steps: int) -> str:
    """``layouts`` one after the other, again and again."""
    given = layouts.split()
    return " ".join(given[step % len(given)] for step in range(num_steps))


def on_all(kit: AdapterKit, fn: Callable, *args: object) -> list:
    return [rank.call("apply", fn, args, timeout_s=3600.0) for rank in kit._ranks]


def test_one_graph_for_each_degree(kits: Kits) -> None:
    kit = kits("qwen-image", num_ranks=2)
    request = FAMILIES["qwen-image"][1]
    layouts = script(ON_TWO, request.steps)
    eager = kit.run(request, layouts)
    on_all(kit, graph_counts.compile_blocks, graph_counts.TRACED)
    payload = kit._prepare(request).payload
    on_all(kit, graph_counts.warm_up_by_itself, payload)
    after_warm_up = on_all(kit, graph_counts.count)
    assert kit.run(request, layouts).identical(eager)
    assert on_all(kit, graph_counts.count) == after_warm_up
    graphs, breaks = zip(*after_warm_up, strict=True)
    # Two degrees; without padding, with it, and of two rows.
    assert set(breaks) == {0} and max(graphs) <= 6, after_warm_up
