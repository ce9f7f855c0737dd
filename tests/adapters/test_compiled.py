"""Compiled blocks: one graph for each degree, whichever ranks run it in which order, and the eager pictures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gfdit.adapters.testing import AdapterKit, KitRequest
from tests.adapters import graph_counts
from tests.adapters.conftest import Kits
from tests.adapters.test_masked_tokens import asked, own

# Of pixels between -1 and 1. Inductor fuses float32 operations, so their rounding differs.
TOLERANCE = 2e-5
NUM_STEPS = 200
# By family: requests with guidance; such whose tokens no degree divides; and what a server is warmed up with.
GUIDED = dict.fromkeys(
    ["qwen-image", "flux"],
    KitRequest(64, 64, steps=NUM_STEPS - 6, negative_prompt="blurry", true_cfg_scale=4.0),
)
GUIDED["wan2.2-ti2v"] = KitRequest(64, 64, 5, steps=NUM_STEPS - 6, negative_prompt="blurry", guidance_scale=4.0)
ODD = dict.fromkeys(["qwen-image", "flux"], KitRequest(80, 80, steps=6, seed=2))
ODD["wan2.2-ti2v"] = KitRequest(96, 96, 5, steps=6, seed=2, guidance_scale=1.0)
REHEARSED = {family: request.but(height=128, width=128, steps=2) for family, request in GUIDED.items()}
# A different degree or order at every step.
ON_TWO = "sp1@0 sp2@0,1 sp1@1 sp2@1,0"
ON_FOUR = "sp1@0 sp2@2,1 sp4@3,0,1,2 cfg2@1,3 sp2@0,3 cfg2xsp2@2,0,3,1 sp1@2 sp4@0,1,2,3"


def script(layouts: str, num_steps: int | None, *, guided: bool) -> str:
    """``layouts`` one after the other, again and again; those for both guidance branches where there are two."""
    assert num_steps is not None
    given = [layout for layout in layouts.split() if guided or not layout.startswith("cfg")]
    return " ".join(given[step % len(given)] for step in range(num_steps))


def on_all(kit: AdapterKit, fn: Callable, *args: object) -> list:
    """One rank after the other: what the first compiles, others find in inductor's cache."""
    return [rank.call("apply", fn, args, timeout_s=3600.0) for rank in kit._ranks]


@pytest.mark.thorough
def test_one_graph_for_each_degree(kits: Kits) -> None:
    kit = kits("qwen-image", num_ranks=2)
    request = ODD["qwen-image"]
    layouts = script(ON_TWO, request.steps, guided=False)
    eager = kit.run(request, layouts)
    on_all(kit, graph_counts.compile_blocks, graph_counts.TRACED)
    assert kit.run(request, layouts).identical(eager)
    assert on_all(kit, graph_counts.count) == [(2, 0), (2, 0)]
    on_all(kit, graph_counts.pass_views)
    kit.run(request, "sp2@0,1 sp2@1,0")
    assert sum(graphs for graphs, _ in on_all(kit, graph_counts.count)) > 4


@pytest.mark.thorough
def test_tokens_under_a_mask_run_as_they_are(kits: Kits) -> None:
    """And leave the graphs of others alone."""
    kit = kits("qwen-image", num_ranks=2)
    request, edit = ODD["qwen-image"], own(asked("qwen-image"))
    layouts = script(ON_TWO, request.steps, guided=False)
    eager, edited = kit.run(request, layouts), kit.run(edit, "sp2@0,1")
    on_all(kit, graph_counts.compile_blocks, graph_counts.TRACED)
    assert kit.run(request, layouts).identical(eager)
    assert kit.run(edit, "sp2@0,1").identical(edited)
    assert kit.run(request, layouts).identical(eager)
    assert {breaks for _, breaks in on_all(kit, graph_counts.count)} == {0}


@pytest.mark.thorough
def test_collectives_that_are_no_operators_end_graphs(kits: Kits) -> None:
    kit = kits("qwen-image", num_ranks=2)
    on_all(kit, graph_counts.call_python_collectives)
    on_all(kit, graph_counts.compile_blocks, graph_counts.TRACED)
    kit.run(ODD["qwen-image"], "sp2@0,1")
    assert all(breaks > 0 for _, breaks in on_all(kit, graph_counts.count))


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [graph_counts.TRACED, "inductor"])
@pytest.mark.parametrize("family", ODD)
def test_two_hundred_steps_of_changing_degree(kits: Kits, family: str, backend: str) -> None:
    """After a rehearsal of a request of another size nothing is compiled."""
    kit = kits(family)
    runs = {
        request: script(ON_FOUR, request.steps, guided=request.negative_prompt is not None)
        for request in (GUIDED[family], ODD[family])
    }
    eager = {request: kit.run(request, layouts) for request, layouts in runs.items()}
    on_all(kit, graph_counts.compile_blocks, backend)
    on_all(kit, graph_counts.rehearse_alone, kit._prepare(REHEARSED[family]).payload)
    after_warm_up = on_all(kit, graph_counts.count)
    differences = [kit.run(request, layouts).difference(eager[request]) for request, layouts in runs.items()]
    counts = on_all(kit, graph_counts.count)
    print(f"{family} {backend}: (graphs, breaks) {after_warm_up}, after {NUM_STEPS} steps {counts}, {differences}")
    assert max(differences) <= (0.0 if backend == graph_counts.TRACED else TOLERANCE)
    assert counts == after_warm_up
    assert {breaks for _, breaks in counts} == {0}
