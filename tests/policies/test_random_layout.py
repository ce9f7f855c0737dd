from __future__ import annotations

from gfdit.core import TaskKind
from gfdit.policies.random_layout import RandomLayout
from tests.support.timed_cluster import simulate
from tests.support.workload import CFG_2, make_request


def layouts(seed: int, count: int) -> list[str]:
    requests = [make_request(f"r{i}", num_steps=40, candidates=CFG_2) for i in range(count)]
    run = simulate(RandomLayout(seed), 4, requests, work_conserving=True)
    return [str(span.layout) for span in run.spans if span.kind is TaskKind.DENOISE]


def test_a_seed_gives_the_same_layouts_and_another_seed_others() -> None:
    assert layouts(0, 3) == layouts(0, 3)
    assert layouts(0, 3) != layouts(1, 3)


def test_it_draws_all_degrees_and_orders() -> None:
    drawn = layouts(0, 1)
    assert {layout.partition("@")[0] for layout in drawn} == {"sp1", "sp2", "sp4", "cfg2xsp1", "cfg2xsp2"}
    assert len(set(drawn)) > 20
