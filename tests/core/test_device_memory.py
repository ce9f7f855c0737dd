"""Layouts that fit: others are not offered, what runs out of memory is tried wider, what fits nowhere is told."""

from __future__ import annotations

import re

import pytest

from gfdit.core import ControlPlane, ExecutionLayout, ParallelSpec, Policy, RankRecord, Shape, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.control.device_memory import BELIEVED_S, MAX_LOADS, DeviceMemory, WorkingBytes
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.events import MemoryPoint, MemoryUse
from gfdit.core.policy import Decision, Dispatch, SchedulerView, TaskView
from gfdit.core.policy.loading import known_policies, load_policy
from gfdit.policies.edf import Edf
from gfdit.policies.fcfs import Fcfs
from tests.core.test_quarantine import Server
from tests.support.workload import CFG_2, SP_1_2_4, make_request

SP1, SP2, SP4 = SP_1_2_4
GIB = 2**30


def is_step(command: cmd.RunTask) -> bool:
    return command.tasks[0].kind is TaskKind.DENOISE


def exhausted_server(policy: Policy, least_sp: int, num_ranks: int = 4) -> Server:
    """Steps at less than ``least_sp`` run out of memory."""
    server = Server(policy, num_ranks, lambda run, rank: is_step(run) and run.layout.parallel.sp < least_sp)
    server.out_of_memory = True
    return server


def test_what_ran_out_of_memory_is_tried_wider_and_remembered() -> None:
    server = exhausted_server(Fcfs(), 4)
    for index in range(10):
        server.at(index * 1.0, ev.RequestArrived(*make_request(f"r{index}")))
    server.run()
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}
    assert server.specs["r0"] == [SP1, SP2, SP4, SP4, SP4], "its other steps go on wide"
    assert all(server.specs[f"r{index}"] == [SP4] * 3 for index in range(1, 10))
    assert not server.plane._quarantine.suspected and not server.restarted


def test_an_error_that_is_none_of_memory_is_not_tried_wider() -> None:
    """The negative control of the test before."""
    server = exhausted_server(Fcfs(), 4)
    server.out_of_memory = False
    server.at(0.0, ev.RequestArrived(*make_request("r0")))
    server.run()
    assert isinstance(server.ends["r0"], cmd.FailRequest) and server.specs["r0"] == [SP1, SP1]


def test_what_runs_out_at_its_widest_fails_with_one_sentence_and_those_after_it_are_refused() -> None:
    server = exhausted_server(Edf(), 8)
    server.at(0.0, ev.RequestArrived(*make_request("first")))
    server.at(5.0, ev.RequestArrived(*make_request("same")))
    server.at(5.0, ev.RequestArrived(*make_request("smaller", size=256)))
    server.at(10.0 + BELIEVED_S, ev.RequestArrived(*make_request("later")))
    server.run()
    assert server.specs["first"] == [SP1, SP2, SP4]
    failed = server.ends["first"]
    assert isinstance(failed, cmd.FailRequest) and failed.status_code == 500
    assert failed.error == (
        "denoise of 512x512 takes more device memory than there is at sp4, the widest layout offered "
        "(rank 0 raised)"
    )
    refused = server.ends["same"]
    assert isinstance(refused, cmd.FailRequest) and refused.status_code == 400 and "same" not in server.ran_on
    assert "takes more device memory than there is at sp4" in refused.error
    assert server.specs["smaller"] == [SP1, SP2, SP4], "of it nothing was known"
    assert server.specs["later"] == [SP1, SP2, SP4], "what was in the way may be gone"


def test_requests_that_wait_already_learn_of_it_too() -> None:
    server = exhausted_server(Fcfs(), 2, num_ranks=2)
    for index in range(6):
        server.at(0.0, ev.RequestArrived(*make_request(f"r{index}", candidates=(SP1, SP2))))
    server.run()
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}
    assert sum(specs.count(SP1) for specs in server.specs.values()) <= 2, "one a rank"


class Pairs:
    """Steps two at a time on one rank."""

    name = "pairs"

    def schedule(self, view: SchedulerView) -> Decision:
        if not view.free_ranks:
            return Decision()
        steps = [task.id for task in view.ready if task.kind is TaskKind.DENOISE]
        others = [task.id for task in view.ready if task.id not in steps]
        tasks = tuple(others[:1] or steps[:2])
        return Decision((Dispatch(tasks, ExecutionLayout(view.free_ranks[:1])),))


def test_a_batch_that_runs_out_of_memory_is_taken_apart() -> None:
    sizes = []

    def fails(run: cmd.RunTask, rank: int) -> bool:
        sizes.append(len(run.tasks))
        return len(run.tasks) > 1

    server = Server(Pairs(), 1, fails)
    server.out_of_memory = True
    for name in "abc":
        server.at(0.0, ev.RequestArrived(*make_request(name, candidates=(SP1,))))
    server.run()
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest} and len(server.ends) == 3
    assert sizes.count(2) == 1


@pytest.mark.parametrize("name", sorted(known_policies()))
@pytest.mark.parametrize("least_sp", [2, 4])
def test_every_policy_serves_what_fits_on_several_ranks_only(name: str, least_sp: int) -> None:
    args = {"script": "*"} if name == "layout_script" else {}
    server = exhausted_server(load_policy(name, args, "none"), least_sp)
    for index in range(12):
        candidates = CFG_2 if index % 3 == 0 else SP_1_2_4
        server.at(index * 0.2, ev.RequestArrived(*make_request(f"r{index}", candidates=candidates)))
    server.run()
    assert len(server.ends) == 12 and not server.faults
    assert {type(end) for end in server.ends.values()} == {cmd.CompleteRequest}


# What is measured


def used(working_gib: float) -> MemoryUse:
    return MemoryUse(80 * GIB, 40 * GIB, int(working_gib * GIB))


def step_of(size: int, sp: int = 1) -> TaskView:
    request, graph = make_request("r", size=size)
    return TaskView.of(request, next(task for task in graph.tasks if task.kind is TaskKind.DENOISE))


def test_working_memory_grows_in_proportion_and_stays_below_what_a_larger_load_took() -> None:
    working = WorkingBytes()
    assert working.expected(10) == 0
    working.add(100, 1000)
    assert [working.expected(load) for load in (50, 100, 200)] == [500, 1000, 2000]
    working.add(400, 2000)
    assert [working.expected(load) for load in (100, 150, 300, 400, 800)] == [1000, 1500, 2000, 2000, 4000]
    working.add(400, 1900)
    assert working.expected(400) == 2000, "the most that was measured"


def test_loads_without_end_are_not_kept() -> None:
    working = WorkingBytes()
    for load in range(1, 3 * MAX_LOADS):
        working.add(load, load)
    assert len(working._loads) <= MAX_LOADS and working.expected(1e6) == pytest.approx(1e6)


def test_capacity_is_that_of_the_smallest_rank_less_what_artifacts_may_take() -> None:
    memory = DeviceMemory(artifact_bytes=GIB)
    memory.observe(0, step_of(512), SP1, 1, used(1))
    memory.observe(1, step_of(512), SP1, 1, MemoryUse(70 * GIB, 40 * GIB, GIB))
    assert memory.capacity_bytes == 69 * GIB
    limited = DeviceMemory(limit_bytes=50 * GIB)
    limited.observe(0, step_of(512), SP1, 1, used(1))
    assert limited.capacity_bytes == 50 * GIB
    with pytest.raises(ValueError, match="device_memory_bytes must be at least 1, got 0"):
        DeviceMemory(0)


def test_layouts_that_would_take_too_much_are_not_offered_and_requests_that_fit_nowhere_are_refused() -> None:
    """40 GiB of weights, 10 GiB for 1024 x 1024 on one rank, a device of 80 GiB."""
    control = ControlPlane(Fcfs(), [RankRecord(rank, frozenset("m")) for rank in range(4)], NominalCostModel())
    point = MemoryPoint(TaskKind.DENOISE, Shape(1024, 1024), False, SP1, 1, used(10))
    control.handle(ev.MemoryMeasured(0, (point,)), 0.0)

    def offered(size: int) -> tuple[ParallelSpec, ...]:
        name = f"r{size}"
        control.handle(ev.RequestArrived(*make_request(name, size=size)), 0.0)
        control.check_integrity()
        return control.state.requests[name].view().candidates

    assert offered(2048) == (SP1, SP2, SP4)
    assert offered(2560) == (SP2, SP4), "62.5 GiB beside the weights on one rank, 31.25 on two"
    assert offered(4096 - 512) == (SP4,)
    commands = control.handle(ev.RequestArrived(*make_request("vast", size=4096)), 0.0)
    assert commands == [] or all(not isinstance(command, cmd.FailRequest) for command in commands), "just fits"
    (refusal,) = control.handle(ev.RequestArrived(*make_request("huge", size=8192)), 0.0)
    assert refusal == cmd.FailRequest(
        "huge",
        "denoise of 8192x8192 takes about 200.00 GiB of device memory at sp4, the widest layout offered, "
        "and there are 80.00 GiB",
        400,
    )
    assert "huge" not in control.state.requests


def test_text_does_not_grow_with_the_image() -> None:
    memory = DeviceMemory()
    request, graph = make_request("r", size=64)
    encode = TaskView.of(request, graph.tasks[0])
    memory.observe(0, encode, SP1, 1, used(30))
    large, graph = make_request("r", size=4096)
    assert memory.excluded(TaskView.of(large, graph.tasks[0]), (SP1,), 0.0) == frozenset()
    memory.note_failure(encode, SP1, 1, 0.0)
    assert memory.excluded(TaskView.of(large, graph.tasks[0]), (SP1,), 0.0) == frozenset()


def test_what_tasks_took_is_learned_while_serving() -> None:
    server = Server(Fcfs(), 4, lambda *_: False)
    server.measure = lambda run: used(10 * run.tasks[0].step_index if is_step(run) else 1)
    server.at(0.0, ev.RequestArrived(*make_request("a", size=1024, num_steps=3)))
    server.at(9.0, ev.RequestArrived(*make_request("b", size=2048, num_steps=3)))
    server.run()
    assert server.specs == {"a": [SP1] * 3, "b": [SP2] * 3}, "20 GiB at one rank, so 80 beside 40 of weights"


def test_guidance_parallelism_takes_no_memory_away() -> None:
    memory = DeviceMemory()
    memory.observe(0, step_of(1024), SP1, 1, used(10))
    excluded = memory.excluded(step_of(2560), CFG_2, 0.0)
    assert excluded == {SP1, ParallelSpec(1, 2)}
    assert not re.search("cfg", memory.describe(step_of(8192), SP4))


def test_a_request_that_needs_more_ranks_than_will_ever_be_there_is_told_so() -> None:
    control = ControlPlane(Fcfs(), [RankRecord(rank, frozenset("m")) for rank in range(2)], NominalCostModel())
    wide, narrow = (make_request(name, candidates=specs) for name, specs in (("w", (SP2,)), ("n", (SP1, SP2))))
    for request, graph in (wide, narrow):
        control.handle(ev.RequestArrived(request, graph), 0.0)
    commands = control.handle(ev.RankLost(1, "test"), 1.0)
    assert not any(isinstance(command, cmd.FailRequest) for command in commands), "it comes again"
    (run,) = (dispatch for dispatch in control.state.dispatches.values() if 0 in dispatch.members)
    commands = control.handle(ev.RankLost(1, "test", for_good=True), 2.0)
    commands += control.handle(ev.TaskFinished(run.id, 0, 1.0), 3.0)
    control.check_integrity()
    told = cmd.FailRequest("w", "its denoise takes 2 ranks or more, and 1 of 2 are left for good", 503)
    assert [command for command in commands if isinstance(command, cmd.FailRequest)] == [told]
    assert told in control.handle(ev.RequestArrived(*wide), 4.0)
    assert "n" in control.state.requests
