"""What a control process counts and tells, against simulated runs whose every task is known."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gfdit.core import Policy
from gfdit.core import events as ev
from gfdit.core.policy.loading import load_policy
from gfdit.observe import catalogue as names
from gfdit.observe.meter import Meter
from gfdit.observe.snapshot import Numbers, Series, Snapshot, Totals, note, note_all
from gfdit.runtime import messages as msg
from gfdit.sim.simulator import SimulationOptions, Simulator
from tests.sim.tables import AROUND_S, DECODE_S, ENCODE_S, PREPARE_S, STEP_S, line, table

NUM_RANKS = 2
TRACE = [
    line("a", num_steps=3),
    line("b", 0.5, num_steps=4, slo_class="fast", deadline_s=20.0),
    line("c", 0.5, num_steps=2, cfg=False),
]


class Metered(Simulator):
    """Takes a snapshot after every event, as it would be read on the other side."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, table(), TRACE, SimulationOptions(NUM_RANKS))
        self.meter = Meter(self._control, NUM_RANKS, ["m"])
        self.snapshots: list[Snapshot] = [self.look()]

    def look(self) -> Snapshot:
        snapshot = self.meter.snapshot(self._now_s, [0] * NUM_RANKS, ())
        read = msg.Decoder(msg.ControlMessage).decode(msg.encode(snapshot))
        assert isinstance(read, Snapshot)
        return read

    def _handle(self, event: ev.Event) -> None:
        super()._handle(event)
        self.snapshots.append(self.look())


def sums(snapshot: Snapshot, metric: names.Metric) -> dict[tuple[str, ...], list[float]]:
    return {one.labels: one.values for one in snapshot.sums if one.metric == metric.name}


def test_tasks_and_busy_time_are_those_that_ran() -> None:
    world = Metered(load_policy("fcfs", {}))
    world.run()
    last = world.snapshots[-1]
    tasks = sums(last, names.TASK_SECONDS)
    num_steps = sum([request.num_steps for request in TRACE])
    assert sum(tasks["denoise", "m", "1"][:-1]) == num_steps and tasks["denoise", "m", "1"][-1] == num_steps * 2.0
    assert tasks["encode", "m", "1"][-1] == 3 * ENCODE_S and tasks["decode", "m", "1"][-1] == 3 * DECODE_S
    busy_s = 3 * AROUND_S + num_steps * STEP_S[1]
    assert sum([rank.busy_s for rank in last.ranks]) == busy_s
    assert not last.requests and all([rank.artifact_bytes == 0 for rank in last.ranks])
    assert all([0 < rank.busy_ratio <= 1 for rank in last.ranks])


def test_of_a_wide_task_every_rank_was_busy() -> None:
    world = Metered(load_policy("static", {}))
    world.run()
    last = world.snapshots[-1]
    num_steps = sum([request.num_steps for request in TRACE])
    assert sums(last, names.TASK_SECONDS)["denoise", "m", "2"][-1] == num_steps * STEP_S[2]
    assert min([rank.busy_s for rank in last.ranks]) >= num_steps * STEP_S[2]
    running = [{one.labels[0]: one.values[0] for one in snapshot.levels} for snapshot in world.snapshots]
    assert {tuple(each.items()) for each in running} == {
        (("1", 0), ("2", 0)),
        (("1", 1), ("2", 0)),
        (("1", 0), ("2", 1)),
    }


def test_what_is_left_of_requests() -> None:
    """By the cost model, and less after every task; states and degrees as they run."""
    world = Metered(load_policy("fcfs", {}))
    world.run()
    first = next(snapshot for snapshot in world.snapshots if len(snapshot.requests) == 3)
    rows = {row.id: row for row in first.requests}
    assert rows["c"].state == "queued" and not rows["c"].ranks
    assert rows["c"].left_s == rows["c"].left_rank_s == AROUND_S + 2 * STEP_S[1]
    assert rows["a"].state == "running" and len(rows["a"].ranks) == 1
    assert rows["b"].deadline_s == 20.5 and rows["b"].slo_class == "fast"
    left = [[row.left_rank_s or 0.0 for row in each.requests if row.id == "b"] for each in world.snapshots]
    known = [one[0] for one in left if one]
    assert known == sorted(known, reverse=True) and known[-1] <= DECODE_S + PREPARE_S
    services = {(one.model, one.num_steps): one.seconds for one in world.snapshots[-1].services}
    assert services["m", 4] == {sp: AROUND_S + 4 * STEP_S[sp] for sp in (1, 2)}
    states = Counter(row.state for each in world.snapshots for row in each.requests)
    assert {"queued", "running"} <= states.keys()


def test_counters_are_there_before_anything_is_counted() -> None:
    first = Metered(load_policy("fcfs", {})).snapshots[0]
    assert sums(first, names.TASK_SECONDS).keys() >= {("denoise", "m", "1"), ("denoise", "m", "2")}
    assert [rank.up for rank in first.ranks] == [True, True]
    counters = {one.metric for one in first.sums}
    assert {metric.name for metric in (names.RETRIES, names.QUARANTINES, names.DECISION_SECONDS)} <= counters


COUNTS = st.lists(st.integers(0, 5), min_size=2, max_size=2)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), COUNTS), max_size=30))
def test_totals_never_go_back(steps: list[tuple[bool, bool, list[int]]]) -> None:
    """Control processes come and go, each counts from zero, and what an old one says late is not counted."""
    totals, epoch = Totals(), 0
    ended, current = [0.0, 0.0], [0.0, 0.0]
    for is_new, is_late, counts in steps:
        if is_new:
            ended, current, epoch = [a + b for a, b in zip(ended, current, strict=True)], [0.0, 0.0], epoch + 1
        else:
            current = [a + b for a, b in zip(current, counts, strict=True)]
        totals.take(epoch, [Series("one", (), list(current))])
        if is_late:
            totals.take(epoch - 1, [Series("one", (), [100.0, 100.0])])
            if epoch == 0:  # there is nothing before the first one
                continue
        assert totals.values()["one", ()] == [a + b for a, b in zip(ended, current, strict=True)]


def test_a_snapshot_of_another_kind_is_refused() -> None:
    data = msgspec.msgpack.encode({"type": "Snapshot", "epoch": 0, "at_s": "soon"})
    try:
        msg.Decoder(msg.ControlMessage).decode(data)
    except msg.DamagedMessageError as error:
        assert "at_s" in str(error)
    else:
        raise AssertionError("it was taken in")


@given(st.lists(st.floats(0.0, 100.0) | st.sampled_from(names.TASK_BOUNDS_S)))
def test_many_at_a_time_are_counted_as_one_by_one(found: list[float]) -> None:
    numbers = Numbers()
    one_by_one, together = numbers.of(names.TASK_SECONDS, "one by one"), numbers.of(names.TASK_SECONDS, "together")
    for value in sorted(found):
        note(one_by_one, names.TASK_BOUNDS_S, value)
    note_all(together, names.TASK_BOUNDS_S, found)
    assert one_by_one[:-1] == together[:-1] and abs(one_by_one[-1] - together[-1]) < 1e-6
