from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfdit.core import TaskKind
from gfdit.policies.fcfs import Fcfs
from tests.support.timed_cluster import Run, simulate
from tests.support.workload import CFG_2, Arrival, make_request

ARRIVALS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from([256, 512, 1024]), st.integers(1, 4)), min_size=1, max_size=10
)


def requests_of(arrivals: list[tuple[float, int, int]]) -> list[Arrival]:
    times = itertools.accumulate(wait_s for wait_s, _, _ in arrivals)
    return [
        make_request(f"r{index}", arrival_s=time_s, size=size, num_steps=steps)
        for index, (time_s, (_, size, steps)) in enumerate(zip(times, arrivals, strict=True))
    ]


def group_of(run: Run, request_id: str, group_size: int) -> int:
    groups = {
        rank // group_size for span in run.spans if span.request_id == request_id for rank in span.layout.ranks
    }
    assert len(groups) == 1, f"{request_id} changed its group"
    return groups.pop()


@settings(max_examples=30)
@given(arrivals=ARRIVALS, num_ranks=st.integers(1, 6), group_size=st.integers(1, 7))
def test_each_group_serves_one_request_at_a_time_in_order_of_arrival(
    arrivals: list[tuple[float, int, int]], num_ranks: int, group_size: int
) -> None:
    run = simulate(Fcfs(group_size), num_ranks, requests_of(arrivals))
    served: dict[int, list[str]] = {}
    for index in range(len(arrivals)):
        served.setdefault(group_of(run, f"r{index}", group_size), []).append(f"r{index}")
    for group, request_ids in served.items():
        ends = 0.0
        first_rank, members = group * group_size, min(group_size, num_ranks - group * group_size)
        for request_id in request_ids:
            spans = [span for span in run.spans if span.request_id == request_id]
            assert spans[0].start_s >= ends
            ends = spans[-1].finish_s
            for span in spans:
                assert span.layout.ranks == tuple(range(first_rank, first_rank + span.size))
                wide = span.kind is TaskKind.DENOISE
                assert span.size == (max(s for s in (1, 2, 4) if s <= members) if wide else 1)


def test_one_group_of_all_ranks_is_static_sequence_parallelism() -> None:
    run = simulate(Fcfs(4), 4, [make_request("a", candidates=CFG_2), make_request("b")])
    assert {str(span.layout) for name in "ab" for span in run.of(name)} == {"sp4@0,1,2,3"}
    assert run.of("b", TaskKind.ENCODE)[0].start_s == run.finish_s["a"]


def test_the_last_group_is_smaller_where_the_number_does_not_divide() -> None:
    run = simulate(Fcfs(3), 5, [make_request("a"), make_request("b")])
    assert str(run.of("a")[0].layout) == "sp2@0,1"
    assert str(run.of("b")[0].layout) == "sp2@3,4"


def test_a_request_goes_where_least_work_waits() -> None:
    requests = [
        make_request("long", num_steps=9),
        make_request("short", num_steps=2),
        make_request("next", num_steps=2),
        make_request("last", num_steps=2),
    ]
    run = simulate(Fcfs(1), 2, requests)
    assert [group_of(run, request.id, 1) for request, _ in requests] == [0, 1, 1, 1]


def test_it_forgets_what_has_finished() -> None:
    policy = Fcfs(1)
    simulate(policy, 2, [make_request(f"r{index}", arrival_s=10.0 * index) for index in range(20)])
    assert len(policy._groups._homes) <= 1  # the last one: nobody has asked since


def test_group_size_is_checked() -> None:
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        Fcfs(0)


def test_by_task_a_request_goes_on_where_the_least_waits() -> None:
    run = simulate(Fcfs(1, "task"), 2, [make_request(f"r{index}", num_steps=3) for index in range(5)])
    moved = [
        len({span.layout.ranks for span in run.spans if span.request_id == f"r{index}"}) for index in range(5)
    ]
    assert max(moved) > 1  # once one is free, it takes over what waits elsewhere


def test_with_one_group_tasks_and_requests_go_the_same_way() -> None:
    requests = [make_request(f"r{index}", arrival_s=0.4 * index, num_steps=3) for index in range(4)]
    assert simulate(Fcfs(4, "task"), 4, requests).spans == simulate(Fcfs(4), 4, requests).spans
