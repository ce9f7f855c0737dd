"""What ran where, what was left behind, and what happens when a task fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gfdit.core.commands import ReportFault
from gfdit.observe.timeline import read_timeline
from gfdit.sim.replay import replay
from tests.elastic.recorded import recorded_from_now
from tests.elastic.test_faults import when_back
from tests.support.images import Engine, ImageRequest
from tests.support.waiting import wait_until


def test_no_process_group_is_created_or_used(engine: Engine) -> None:
    engine.images([ImageRequest(128, 128, negative_prompt="x").under("cfg2xsp2@3,1,0,2 sp4@0,1,2,3 sp2@1,2")])
    assert engine.call("tripwire_hits") == [[], [], [], []]
    assert all("used while serving" in answer for answer in engine.call("trip")), (
        "the tripwire must be able to trip"
    )
    engine.call("arm_tripwire")


def test_requests_overlap_in_time_on_disjoint_ranks(
    engine: Engine, timeline_path: Path, recording_path: Path
) -> None:
    scripts = ("encode@0 prepare@0 sp2@0,1 decode@0", "encode@2 prepare@2 sp2@2,3 decode@2")

    def overlap() -> bool:
        with recorded_from_now(recording_path) as recorded:
            engine.images([ImageRequest(256, 256).under(script) for script in scripts])
            names = [name for script in scripts for name in recorded.requests(script)]
        wait_until(lambda: set(names) <= decoded(timeline_path), "the timeline has both requests")
        steps = [span for span in read_timeline(timeline_path) if span.kind == "denoise"]
        ours, theirs = ([span for span in steps if span.request == name] for name in names)
        assert {span.rank for span in ours} == {0, 1} and {span.rank for span in theirs} == {2, 3}
        assert all(span.sp == 2 for span in (*ours, *theirs)) and len(ours) == len(theirs) == 2 * 6
        return sum(a.start_s < b.end_s and b.start_s < a.end_s for a in ours for b in theirs) > 3

    wait_until(overlap, "neither of two requests comes late")


def decoded(timeline: Path) -> set[str]:
    return {span.request for span in read_timeline(timeline) if span.kind == "decode"}


def test_a_member_that_fails_costs_no_request(engine: Engine) -> None:
    good = ImageRequest(128, 128).under("sp2@0,1")
    expected = engine.image(good)
    engine.call("fail_on", 3)
    image = engine.image(ImageRequest(128, 128).under("sp4@0,1,2,3"))
    assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1, "some steps ran on fewer ranks"
    when_back(engine)  # it has failed twice in a row, and was replaced
    engine.watch_workers()
    engine.call("fail_on", None)
    # Peers have left the collective, without a time-out: there is none. Its edges work again.
    assert engine.image(good).tobytes() == expected.tobytes()
    assert engine.image(ImageRequest(128, 128).under("sp4@0,1,2,3")).tobytes() == expected.tobytes()


def test_a_decision_that_breaks_a_rule_is_named_and_the_request_served(
    engine: Engine, recording_path: Path
) -> None:
    for script, rule in (
        ("sp2@0", "sp x cfg must equal the number of ranks"),
        ("sp3@0,1,2", "sp3 is not feasible"),
        ("cfg2@0,1", "cfg2xsp1 is not feasible"),
        ("sp2@1,1", "named twice"),
    ):
        with recorded_from_now(recording_path) as recorded:
            assert engine.image(ImageRequest(128, 128).under(script)).shape == (1, 128, 128, 3)
            told = [entry.message for entry in recorded.entries() if isinstance(entry, ReportFault)]
        assert any(rule in message and "denoise/0" in message for message in told), told
    assert engine.image(ImageRequest(128, 128).under("sp1@0")).shape == (1, 128, 128, 3)


def test_nothing_is_left_behind(engine: Engine) -> None:
    engine.images([ImageRequest(128, 128, seed=seed).under("sp1@1 sp2@2,0 sp4@0,1,2,3") for seed in range(4)])
    assert engine.drained()


def test_a_worker_has_no_semaphores_that_would_outlive_it_if_it_were_killed(engine: Engine) -> None:
    for described in engine.call("gfdit_describe"):
        assert "/dev/shm/sem." not in Path(f"/proc/{described['pid']}/maps").read_text()


def test_a_worker_that_has_nothing_to_do_does_nothing(engine: Engine) -> None:
    """Of the process groups that vLLM-Omni makes none has a thread, which would wake a hundred times a second."""
    for described in engine.call("gfdit_describe"):
        tasks = Path(f"/proc/{described['pid']}/task")
        assert not [name for name in tasks.glob("*/comm") if "gloo" in name.read_text()]


def test_an_abandoned_request_leaves_nothing_behind(engine: Engine, recording_path: Path) -> None:
    for script in ("sp1@1", "sp1@3 sp2@2,0 sp4@0,1,2,3", "encode@2 prepare@3 sp2@1,0 sp2@2,3"):
        with recorded_from_now(recording_path) as recorded:
            leaving = engine.begin(ImageRequest(256, 256, steps=500).under(script))
            wait_until(lambda: recorded.num_steps(script) > 4, "the request runs")  # noqa: B023 - called at once
            leaving.cancel()
            engine.image(ImageRequest(128, 128).under("sp4@0,1,2,3"))
            assert engine.drained()
            assert recorded.num_tasks_since_cancelled(script) == 0, "the ranks are free within one step"


def test_decisions_repeat_from_the_recording(engine: Engine, recording_path: Path) -> None:
    """Those of every test so far in this run, failures and mistakes of the policy included."""
    pair = [ImageRequest(128, 128).under("sp2@0,1 sp4@3,1,0,2"), ImageRequest(128, 128).under("sp1@1 sp2@1,2")]
    engine.images(pair)
    assert engine.drained()
    done = replay(recording_path)
    assert done.difference is None and done.num_events > 40
    turned = replay(recording_path, {"interleave": "false"})
    assert turned.difference is not None, "another policy must be noticed"
