"""Memory of artifacts on real workers: shown, bounded, and given back."""

from __future__ import annotations

import re

from gfdit.core import commands as cmd
from gfdit.observe.snapshot import Snapshot
from tests.runtime.test_runtime import Runtime, assert_nothing_held
from tests.support.fake_executor import SHAPE

LATENTS_BYTES = SHAPE[0] * SHAPE[1] * SHAPE[2] * 8 + 8
LIMIT_BYTES = 3 * LATENTS_BYTES  # room for one request and its next step, not for two


def test_requests_wait_for_room_and_ranks_hold_no_more_than_they_may() -> None:
    runtime = Runtime(policy="fcfs", max_artifact_bytes=LIMIT_BYTES)
    runtime.wait_ready()
    names: list[str] = []

    def submit() -> None:
        names.append(f"r{len(names)}")
        runtime.submit(names[-1], "", payload="0.02", num_steps=6)

    for _ in range(6):
        submit()
    started: list[str] = []
    ended: list[str] = []
    shown: list[list[int]] = []
    while len(ended) < len(names) or any(shown[-1]):
        for message in runtime.client.receive(5):
            match message:
                case cmd.StartRequest(request_id):
                    started.append(request_id)
                    assert len(started) - len(ended) == 1, "a second one has no room"
                case cmd.CompleteRequest(request_id):
                    ended.append(request_id)
                    if max(map(max, shown), default=0) < LATENTS_BYTES:
                        submit()  # until a snapshot was taken while a request was between its steps
                case Snapshot():
                    shown.append([rank.artifact_bytes for rank in message.ranks])
    assert started == ended == names
    most = max(max(by_rank) for by_rank in shown)
    assert LATENTS_BYTES <= most <= LIMIT_BYTES
    assert_nothing_held(runtime)
    runtime.close()


def test_a_task_that_runs_out_of_memory_gives_it_back_and_runs_wider() -> None:
    runtime = Runtime(policy="fcfs")
    runtime.wait_ready()
    pids = runtime.values("pid")
    runtime.submit("narrow-1-2", "")  # from step 1 on it takes two ranks
    runtime.submit("narrow-9-2", "")  # never
    ended = runtime.until_ended("narrow-1-2", "narrow-9-2")
    assert {end.outcome for end in ended.values()} == {"completed"}
    assert sorted(runtime.values("reclaims"), key=str) == [0, 0, 1], "once, and only where it ran out"
    runtime.submit("narrow-1-9", "")
    (end,) = runtime.until_ended("narrow-1-9").values()
    assert end.outcome == "failed" and end.status_code == 500
    assert re.fullmatch(
        "denoise of 64x64 takes more device memory than there is at [^,]*, the widest layout offered "
        r"\(narrow-1-9/denoise/1 failed on rank \d: OutOfMemoryError: tried to allocate 1000 GiB\)",
        end.error,
    )
    assert runtime.values("pid") == pids, "no rank is to blame"
    assert_nothing_held(runtime)
    runtime.close()
