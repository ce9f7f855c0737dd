"""Components in the control plane: what ranks have, loads that come to nothing, and where they may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gfdit.core import (
    ControlPlane,
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    Policy,
    RankRecord,
    Request,
    SchedulerView,
    Shape,
    Task,
    TaskGraph,
    TaskKind,
)
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.components import Component, Load
from gfdit.core.control.residency import BELIEVED_S, MAX_FAILURES, Residency
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.policy import PolicyError, RankView
from gfdit.policies.edf import Edf
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.lego import Lego
from gfdit.policies.triage import Triage

SP_2 = (ParallelSpec(2),)


def arrival(
    name: str, component: str, candidates: tuple[ParallelSpec, ...] = (ParallelSpec(1),)
) -> ev.RequestArrived:
    """Of a request with one step."""
    request = Request(name, "workflow", Shape(64, 64), 1, 0.0)
    task = Task(f"{name}/step", name, TaskKind.DENOISE, 0, (), (), candidates, (), component, "step")
    return ev.RequestArrived(request, TaskGraph(name, (task,)))


class Driver:
    """Loads are answered at once, with ``error`` if there is one; tasks are left to run."""

    def __init__(self, components: Sequence[Component], num_ranks: int = 2, policy: Policy | None = None) -> None:
        ranks = [RankRecord(rank, frozenset()) for rank in range(num_ranks)]
        self.plane = ControlPlane(
            policy or Lego(), ranks, NominalCostModel(), components=components, component_bytes=4
        )
        self.error = ""
        self.answers = True
        self.loads: list[cmd.LoadComponent] = []
        self.ran: list[cmd.RunTask] = []
        self.freed: list[cmd.FreeArtifacts] = []
        self.faults: list[str] = []
        self.endings: list[cmd.Command] = []
        self.now_s = 0.0

    def tell(self, event: ev.Event) -> None:
        self.now_s += 1.0
        commands = self.plane.handle(event, self.now_s)
        self.plane.check_integrity()
        for command in commands:
            match command:
                case cmd.LoadComponent(number, rank):
                    self.loads.append(command)
                    if self.answers:
                        self.tell(ev.ComponentLoaded(number, rank, 1.0, 0, self.error))
                case cmd.RunTask():
                    self.ran.append(command)
                case cmd.FreeArtifacts():
                    self.freed.append(command)
                case cmd.ReportFault(message):
                    self.faults.append(message)
                case cmd.FailRequest():
                    self.endings.append(command)
                case cmd.ResetEdges(number, _, members):
                    for rank in members:
                        self.tell(ev.EdgesReset(number, rank))


def test_a_rank_that_is_late_still_has_what_it_has_loaded() -> None:
    driver = Driver([Component("base", 3), Component("net", 3)])
    for rank in range(2):
        driver.tell(ev.RankLost(rank, "late"))
    driver.tell(ev.RankJoined(0, ("net",)))
    assert driver.plane.state.ranks.present[0].resident == {"net"}
    driver.tell(arrival("r", "base"))
    assert [(load.component, load.evict) for load in driver.loads] == [("base", ("net",))]
    driver.tell(ev.RankJoined(1))
    assert driver.plane.state.ranks.present[1].resident == set()


@pytest.mark.parametrize("policy", [Lego, Triage, Fcfs])
def test_what_takes_two_ranks_gets_its_component_on_both(policy: type) -> None:
    driver = Driver([Component("base", 3), Component("net", 3)], policy=policy())
    driver.tell(arrival("r", "base", SP_2))
    assert [set(run.layout.ranks) for run in driver.ran] == [{0, 1}]


@pytest.mark.parametrize("policy", [Lego, Triage, Fcfs])
def test_who_takes_two_ranks_do_not_take_them_from_each_other_for_ever(policy: type) -> None:
    driver = Driver([Component("base", 3), Component("other", 3)], policy=policy())
    driver.answers = False
    driver.tell(arrival("r", "base", SP_2))
    driver.tell(arrival("s", "other", SP_2))
    for number in range(6):
        if number < len(driver.loads):
            load = driver.loads[number]
            driver.tell(ev.ComponentLoaded(load.load_id, load.rank, 1.0))
    assert [run.tasks[0].component for run in driver.ran][:1] in (["base"], ["other"])
    assert len(driver.loads) <= 3


def test_where_a_component_may_not_be_nothing_is_idle() -> None:
    """The rank that may have it is away: nobody is to blame that it waits."""
    driver = Driver([Component("base", 3, ranks=(0,)), Component("net", 3)])
    driver.tell(ev.RankLost(0, "test"))
    driver.tell(arrival("r", "base"))
    assert (driver.faults, driver.ran, driver.endings) == ([], [], [])
    driver.tell(ev.RankJoined(0))
    assert [run.layout.ranks for run in driver.ran] == [(0,)]


def test_what_may_be_on_ranks_that_are_gone_for_good_ends() -> None:
    driver = Driver([Component("base", 3, ranks=(0,)), Component("net", 3)])
    driver.tell(ev.RankLost(0, "test"))
    driver.tell(arrival("r", "base"))
    driver.tell(arrival("s", "net"))
    driver.tell(ev.RankLost(0, "test", for_good=True))
    reason = "its denoise takes 1 ranks or more, and of those that may have base 0 are left for good"
    assert driver.endings == [cmd.FailRequest("r", reason, 503)]
    driver.tell(arrival("late", "base"))
    assert driver.endings[1:] == [cmd.FailRequest("late", reason, 503)]
    assert [run.tasks[0].request_id for run in driver.ran] == ["s"]


def test_a_load_that_ends_its_process_again_and_again_ends_the_requests_that_need_it() -> None:
    driver = Driver([Component("base", 3), Component("net", 3)], num_ranks=1)
    driver.answers = False
    driver.tell(arrival("r", "base"))
    for number in range(MAX_FAILURES):
        assert (len(driver.loads), driver.endings) == (number + 1, [])
        driver.tell(ev.RankLost(0, "killed"))
        driver.tell(ev.RankJoined(0))
    reason = "component base cannot be loaded: rank 0 was lost: killed"
    assert driver.endings == [cmd.FailRequest("r", reason, 503)]
    driver.tell(arrival("s", "net"))
    assert [load.component for load in driver.loads[MAX_FAILURES:]] == ["net"]


def test_who_needs_a_component_on_more_ranks_than_can_have_it_ends() -> None:
    """It is on one of two ranks, and the other never gets it: those that run on both would wait for ever."""
    driver = Driver([Component("base", 3)])
    for rank, resident in enumerate((("base",), ())):
        driver.tell(ev.RankLost(rank, "late"))
        driver.tell(ev.RankJoined(rank, resident))
    driver.error = "no such file"
    driver.tell(arrival("wide", "base", SP_2))
    reason = "component base cannot be loaded: no such file"
    assert driver.endings == [cmd.FailRequest("wide", reason, 503)] and not driver.faults
    driver.tell(arrival("late", "base", SP_2))
    assert driver.endings[1:] == [cmd.FailRequest("late", reason, 503)]
    driver.tell(arrival("narrow", "base"))
    assert [run.layout.ranks for run in driver.ran] == [(0,)]


def test_what_can_run_is_not_held_up_by_what_has_no_place() -> None:
    driver = Driver([Component("text", 1, ranks=(0,)), Component("vae", 1)], policy=Triage())
    driver.tell(ev.RankLost(0, "test"))
    request = Request("r", "workflow", Shape(64, 64), 0, 0.0)
    tasks = [
        Task(f"r/{name}", "r", kind, 0, (), (f"r/{name}-made",), (ParallelSpec(1),), (), name, name)
        for name, kind in (("text", TaskKind.ENCODE), ("vae", TaskKind.PREPARE))
    ]
    driver.tell(ev.RequestArrived(request, TaskGraph("r", tuple(tasks))))
    assert [run.tasks[0].component for run in driver.ran] == ["vae"]
    assert driver.faults == []


def test_what_nobody_reads_was_not_read_on_its_way() -> None:
    """A task whose rank is lost runs again, also in a graph with streams."""
    driver = Driver([Component("net", 1), Component("base", 1)], num_ranks=1)
    request = Request("r", "workflow", Shape(64, 64), 1, 0.0)
    one = (ParallelSpec(1),)
    tasks = (
        Task("r/last", "r", TaskKind.ENCODE, 0, (), ("r/unread",), one, (), "net", "last"),
        Task("r/net", "r", TaskKind.CONTROL, 0, (), ("r/residuals",), one, (), "net", "net"),
        Task("r/base", "r", TaskKind.DENOISE, 0, (), (), one, ("r/residuals",), "base", "base"),
    )
    driver.tell(ev.RequestArrived(request, TaskGraph("r", tasks)))
    assert [task.id for task in driver.ran[0].tasks] == ["r/last"]
    driver.tell(ev.RankLost(0, "test"))
    driver.tell(ev.RankJoined(0))
    assert [task.id for task in driver.ran[1].tasks] == ["r/last"]


def test_what_is_still_being_made_is_not_freed_where_that_is() -> None:
    """Its reader is done with it on its way: the order may come once it is made, when it is wanted again."""
    driver = Driver([Component("net", 1), Component("base", 1)])
    request = Request("r", "workflow", Shape(64, 64), 1, 0.0)
    one = (ParallelSpec(1),)
    tasks = (
        Task("r/net", "r", TaskKind.CONTROL, 0, (), ("r/residuals",), one, (), "net", "net"),
        Task("r/base", "r", TaskKind.DENOISE, 0, (), ("r/latents",), one, ("r/residuals",), "base", "base"),
        Task("r/decode", "r", TaskKind.DECODE, 0, ("r/latents",), (), one, (), "base", "decode"),
    )
    driver.tell(ev.RequestArrived(request, TaskGraph("r", tasks)))
    net, base = driver.ran
    assert [move.streamed for move in base.migrations] == [net.dispatch_id]
    driver.plane.state.requests["r"].has_strays = True  # as after a fault
    driver.tell(ev.TaskFinished(base.dispatch_id, base.layout.ranks[0], 0.1))
    assert {free.ranks for free in driver.freed} == {base.layout.ranks}
    driver.tell(ev.TaskFinished(net.dispatch_id, net.layout.ranks[0], 0.1))
    assert driver.freed[-1].artifacts == ("r/residuals",)
    assert set(net.layout.ranks) <= set(driver.freed[-1].ranks)


@pytest.mark.parametrize("policy", [Lego, Triage, Fcfs])
def test_who_waits_for_ranks_that_never_come_holds_up_nobody(policy: type) -> None:
    """Neither what it needs while it waits, nor once it has ended."""
    driver = Driver([Component("base", 3), Component("other", 3)], num_ranks=3, policy=policy())
    driver.tell(ev.RankLost(2, "test"))
    driver.tell(arrival("r", "base", (ParallelSpec(3),)))
    driver.tell(arrival("s", "other", SP_2))
    driver.tell(ev.RankLost(2, "test", for_good=True))
    assert [run.tasks[0].request_id for run in driver.ran] == ["s"]
    reason = "its denoise takes 3 ranks or more, and of those that may have base 2 are left for good"
    assert driver.endings == [cmd.FailRequest("r", reason, 503)]


class OldestOnly:
    """Gives all ranks to the oldest request, and waits for as many as that takes."""

    name = "oldest only"

    def schedule(self, view: SchedulerView) -> Decision:
        spec = view.ready[0].candidates[0]
        if spec.size > len(view.free_ranks):
            return Decision(wake_at_s=view.now_s + 1000.0)
        return Decision((Dispatch((view.ready[0].id,), ExecutionLayout(view.free_ranks[: spec.size], spec)),))


def test_when_requests_end_that_ranks_are_missing_for_the_policy_is_asked_again() -> None:
    driver = Driver([Component("m", 1, pinned=True)], policy=OldestOnly())
    for rank in driver.plane.state.ranks.present:
        driver.plane.state.ranks.note_resident(rank, frozenset({"m"}))
    driver.tell(ev.RankLost(1, "test"))
    driver.tell(arrival("r", "m", SP_2))
    driver.tell(arrival("s", "m"))
    assert driver.ran == []
    driver.tell(ev.RankLost(1, "test", for_good=True))
    assert [run.tasks[0].request_id for run in driver.ran] == ["s"]


@pytest.mark.parametrize("policy", [Triage, Edf])
def test_what_cannot_be_loaded_is_used_where_it_is_and_not_tried_before_its_time(policy: type) -> None:
    driver = Driver([Component("base", 1)], num_ranks=2, policy=policy())
    driver.answers = False
    driver.tell(arrival("first", "base"))
    here, answered = driver.loads[0], 1
    driver.tell(ev.ComponentLoaded(here.load_id, here.rank, 1.0, 0))
    for number in range(2 * MAX_FAILURES):  # while it runs the other rank has nothing to do
        driver.tell(arrival(f"r{number}", "base"))
        while answered < len(driver.loads):
            load = driver.loads[answered]
            answered += 1
            driver.tell(ev.ComponentLoaded(load.load_id, load.rank, 1.0, 0, "no such file"))
    assert answered == 1 + MAX_FAILURES and not driver.endings and not driver.faults
    assert [run.layout.ranks for run in driver.ran] == [(here.rank,)]
    driver.now_s += BELIEVED_S
    driver.tell(arrival("last", "base"))
    assert len(driver.loads) == answered + 1


def test_a_policy_that_loads_it_all_the_same_is_told() -> None:
    held = Residency([Component("base", 1)])
    for number in range(MAX_FAILURES):
        held.begin(number, Load(0, "base"))
        held.end(number, 1.0, 0, "no such file", now_s=5.0)
    rank = RankView(0, None, None, frozenset(), 0)
    assert held.offered(6.0)["base"].ranks == () and held.table["base"].ranks is None
    with pytest.raises(PolicyError, match="for a load of base: component base cannot be loaded: no such file"):
        held.check(Load(0, "base"), policy="mine", ranks={0: rank}, now_s=6.0)
    assert held.check(Load(0, "base"), policy="mine", ranks={0: rank}, now_s=5.0 + BELIEVED_S)
    assert held.offered(6.0 + BELIEVED_S)["base"].ranks is None
