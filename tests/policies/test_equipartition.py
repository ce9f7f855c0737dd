from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gfdit.core import (
    ExecutionLayout,
    ParallelSpec,
    RankView,
    RequestView,
    SchedulerView,
    Shape,
    TaskKind,
    TaskView,
)
from gfdit.core.cost.table import NominalCostModel
from gfdit.policies.equipartition import Equipartition
from tests.policies.test_fcfs import ARRIVALS, requests_of
from tests.support.timed_cluster import OTHER_S, STEP_S, simulate
from tests.support.workload import SP_1_2_4, make_request


@pytest.mark.parametrize(
    ("num_ranks", "count", "sizes"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (4, 3, [2, 1, 1]),
        (4, 4, [1, 1, 1, 1]),
        (8, 3, [4, 2, 2]),
        (8, 5, [2, 2, 2, 1, 1]),
        (3, 1, [2]),
        (6, 2, [4, 2]),
    ],
)
def test_ranks_are_split_evenly_and_what_is_left_goes_to_the_oldest(
    num_ranks: int, count: int, sizes: list[int]
) -> None:
    run = simulate(Equipartition(), num_ranks, [make_request(f"r{i}", num_steps=4) for i in range(count)])
    # From the second step on: during the first one others may still be encoding, on a rank each.
    assert [run.sizes(f"r{i}")[1] for i in range(count)] == sizes


def test_more_requests_than_ranks_run_one_each_the_oldest_first() -> None:
    run = simulate(Equipartition(), 2, [make_request(f"r{i}", num_steps=2) for i in range(5)])
    finish_s = [run.finish_s[f"r{i}"] for i in range(5)]
    assert finish_s == sorted(finish_s)


def test_a_newcomer_waits_for_one_step_at_most() -> None:
    """ "old" holds all four ranks when "new" arrives in the middle of its step."""
    run = simulate(Equipartition(), 4, [make_request("old", num_steps=12), make_request("new", arrival_s=1.1)])
    running = next(span for span in run.of("old") if span.start_s <= 1.1 < span.finish_s)
    assert running.size == 4
    assert run.of("new", TaskKind.ENCODE)[0].start_s == running.finish_s
    assert run.of("old")[running.step_index + 1].size == 2
    assert run.sizes("new") == [2, 2, 2]
    # and grows again within one of its own steps once it is alone
    after = [span for span in run.of("old") if span.start_s > run.finish_s["new"]]
    assert after and {span.size for span in after[1:]} == {4}


def test_a_request_stays_where_its_artifacts_are() -> None:
    run = simulate(Equipartition(), 4, [make_request("a", num_steps=8), make_request("b", num_steps=8)])
    for name in "ab":
        assert len({span.layout for span in run.of(name)}) == 1
    # conditioning and latents, to the one rank that each request took on
    assert run.num_copies == 4


def test_shrinking_copies_nothing_and_growing_copies_to_newcomers_only() -> None:
    run = simulate(Equipartition(), 4, [make_request("old", num_steps=12), make_request("new", arrival_s=1.1)])
    layouts = [span.layout.ranks for span in run.of("old")]
    for before, after in itertools.pairwise(layouts):
        assert set(after) <= set(before) or set(before) <= set(after)


def test_max_sp_bounds_the_degree() -> None:
    assert set(simulate(Equipartition(max_sp=2), 4, [make_request("a")]).sizes("a")) == {2}
    with pytest.raises(ValueError, match="max_sp must be at least 1, got 0"):
        Equipartition(max_sp=0)


@settings(max_examples=40)
@given(arrivals=ARRIVALS, num_ranks=st.integers(1, 8))
def test_no_task_waits_beside_a_free_rank(arrivals: list[tuple[float, int, int]], num_ranks: int) -> None:
    run = simulate(Equipartition(), num_ranks, requests_of(arrivals), work_conserving=True)
    widest = max(spec.size for spec in SP_1_2_4 if spec.size <= num_ranks)
    for index, (_, size, steps) in enumerate(arrivals):
        # Never slower than alone on one rank behind everything that came before it.
        work_s = sum(s * (n / 512) ** 2 * STEP_S + 3 * OTHER_S for _, n, s in arrivals[: index + 1])
        arrival_s = sum(wait_s for wait_s, _, _ in arrivals[: index + 1])
        assert run.finish_s[f"r{index}"] <= arrival_s + 2 * work_s
        alone_s = steps * (size / 512) ** 2 * STEP_S / widest + 3 * OTHER_S
        assert run.finish_s[f"r{index}"] >= arrival_s + alone_s - 1e-9


def dispatched(*tasks: tuple[TaskView, RequestView], num_ranks: int = 4) -> dict[str, str]:
    """The layout chosen for each ready task, by request."""
    view = SchedulerView(
        now_s=0.0,
        ready=tuple(task for task, _ in tasks),
        requests={request.id: request for _, request in tasks},
        ranks=tuple(RankView(rank, None, None, frozenset({"m"}), 0) for rank in range(num_ranks)),
        free_ranks=tuple(range(num_ranks)),
        cost=NominalCostModel(),
    )
    decision = Equipartition().schedule(view)
    return {d.tasks[0].partition("/")[0]: str(d.layout) for d in decision.dispatches}


def denoising(
    name: str, last: tuple[int, ...], latents: tuple[int, ...], conditioning: tuple[int, ...]
) -> tuple[TaskView, RequestView]:
    """A request before a denoising step, the layout it last ran on and the ranks that hold its inputs."""
    shape, artifacts = Shape(512, 512), (("latents", latents), ("conditioning", conditioning))
    task = TaskView(f"{name}/denoise/1", name, "m", TaskKind.DENOISE, 1, shape, False, SP_1_2_4, artifacts)
    layout = ExecutionLayout(last, ParallelSpec(len(last)))
    left = {TaskKind.DENOISE: 3, TaskKind.DECODE: 1}
    request = RequestView(
        name, "m", shape, False, 1, 4, 0.0, None, 0, "default", SP_1_2_4, left, layout, running=False
    )
    return task, request


def test_it_keeps_the_order_of_the_ranks_it_stays_on() -> None:
    a, b = denoising("a", (3, 2), (2, 3), (2, 3)), denoising("b", (1, 0), (0, 1), (0, 1))
    assert dispatched(a, b) == {"a": "sp2@3,2", "b": "sp2@1,0"}


def test_it_grows_to_a_rank_that_already_holds_part_of_the_inputs() -> None:
    a, b = denoising("a", (0,), (0,), (0, 3)), denoising("b", (2,), (2,), (2,))
    assert dispatched(a, b) == {"a": "sp2@0,3", "b": "sp2@2,1"}


def test_it_does_not_grow_to_a_rank_that_another_waiting_request_would_stay_on() -> None:
    a, b = denoising("a", (0,), (0,), (0,)), denoising("b", (1,), (1,), (1,))
    assert dispatched(a, b) == {"a": "sp2@0,2", "b": "sp2@1,3"}


def test_a_request_that_is_not_denoising_is_entitled_to_one_rank() -> None:
    """Of three requests on four ranks the oldest would get two, but it decodes."""
    a, b, c = (denoising(name, (rank,), (rank,), (rank,)) for rank, name in enumerate("abc"))
    decode = replace(a[0], id="a/decode", kind=TaskKind.DECODE, candidates=(ParallelSpec(),))
    decoding = replace(a[1], tasks_left={TaskKind.DENOISE: 0, TaskKind.DECODE: 1})
    assert dispatched((decode, decoding), b, c) == {"a": "sp1@0", "b": "sp2@1,3", "c": "sp1@2"}
