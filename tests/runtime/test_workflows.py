"""Workflows in real processes: streams between ranks, components that are loaded, and what goes wrong there."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gfdit.core import Request, Shape, TaskGraph
from gfdit.core.components import Component
from gfdit.runtime import messages as msg
from tests.runtime.test_runtime import Runtime, assert_nothing_held
from tests.sim.pools import BASE, NETS, TEXT, VAE, graph
from tests.support.pool_executor import NUM_PARTS
from tests.support.waiting import HANG_S

KIB = 1024
COMPONENTS = [
    Component(TEXT, 2 * KIB, pinned=True, ranks=(0,)),
    Component(BASE, 4 * KIB, 0.01),
    Component(VAE, KIB, 0.01),
    *(Component(name, KIB, 0.01) for name in NETS),
]
NUM_STEPS = 4
PART_SUM = sum(range(NUM_PARTS))


class Pool(Runtime):
    """Three ranks on which there is room for the base model and one thing more."""

    def __init__(self, folder: Path, components: list[Component] = COMPONENTS, policy: str = "lego") -> None:
        payload = pickle.dumps(({one.name: one for one in components}, str(folder)))
        super().__init__(
            payload,
            policy,
            comm_timeout_s=HANG_S,
            components=components,
            component_bytes=7 * KIB,
            executor="tests.support.pool_executor",
        )

    def submit_nets(self, name: str, num_nets: int, part_s: float = 0.001) -> None:
        request = Request(name, f"nets-{num_nets}", Shape(64, 64), NUM_STEPS, time.monotonic())
        self.client.send(msg.Submit(request, graph(request, num_nets), str(part_s).encode()))

    def num_streamed(self) -> int:
        return sum([int(str(value)) for value in self.values("streamed")])

    def check(self, *names: str) -> None:
        """All of them complete, with the right numbers."""
        ended = self.until_ended(*names)
        for name in names:
            assert ended[name].outcome == "completed", ended[name]
            num_nets = int(name.rpartition("/")[2])
            assert self.results[name] == str(NUM_STEPS * (1 + num_nets * PART_SUM)).encode(), name


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    pool.wait_ready()
    yield pool
    pool.close()


def test_parts_reach_the_base_model_while_its_nets_run(pool: Pool) -> None:
    before = pool.num_streamed()
    pool.submit_nets("one/2", 2, part_s=0.02)
    pool.check("one/2")
    streamed = pool.num_streamed() - before
    assert streamed >= NUM_PARTS, "nothing was read while it was made"


def test_many_requests_share_what_is_loaded(pool: Pool) -> None:
    names = [f"r{number}/{number % 3}" for number in range(12)]
    for name in names:
        pool.submit_nets(name, int(name[-1]))
    pool.check(*names)
    assert_nothing_held(pool)


@pytest.mark.parametrize("word", ["bad", "dies"])
def test_a_net_that_ends_in_the_middle_of_its_parts_is_run_again(pool: Pool, word: str) -> None:
    name = f"{word}-1"
    pool.submit_nets(name, 1, part_s=0.02)
    pool.submit_nets("other/1", 1)
    ended = pool.until_ended(name, "other/1")
    assert {end.outcome for end in ended.values()} == {"completed"}, ended
    assert pool.results[name] == str(NUM_STEPS * (1 + PART_SUM)).encode()


def test_what_cannot_be_loaded_ends_its_requests_alone(tmp_path: Path) -> None:
    bad = [one if one.name != NETS[1] else Component("unloadable-net", KIB) for one in COMPONENTS]
    pool = Pool(tmp_path, bad)
    pool.wait_ready()
    request = Request("lost", "nets-2", Shape(64, 64), NUM_STEPS, time.monotonic())
    tasks = [
        replace(task, component="unloadable-net") if task.component == NETS[1] else task
        for task in graph(request, 2).tasks
    ]
    pool.client.send(msg.Submit(request, TaskGraph("lost", tuple(tasks)), b"0.001"))
    pool.submit_nets("good/1", 1)
    ended = pool.until_ended("lost", "good/1")
    assert ended["good/1"].outcome == "completed"
    assert ended["lost"].outcome == "failed"
    assert "component unloadable-net cannot be loaded: FileNotFoundError" in ended["lost"].error
    pool.close()
