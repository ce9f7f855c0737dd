"""Devices that are too small for some layouts: the server's own rules, under the simulator's clock."""

from __future__ import annotations

from pytest import approx

from gfdit.policies.edf import Edf
from gfdit.sim.device_memory import DeviceMemory
from gfdit.sim.simulator import Status
from tests.sim.runs import ends, run
from tests.sim.tables import AROUND_S, MIGRATION_S, STEP_S, line

# 512 x 512 has 1024 tokens: a step takes 60 GiB on one rank, 30 on two.
SMALL = DeviceMemory(80.0, 40.0, 60.0)


def test_what_does_not_fit_runs_wider() -> None:
    done = run(Edf(), [line("a"), line("b", 20.0)], memory=SMALL)
    assert not done.faults
    lasts_s = AROUND_S + 2 * STEP_S[2] + MIGRATION_S
    assert ends(done) == {
        "a": approx(lasts_s, abs=2 * MIGRATION_S),
        "b": approx(20 + lasts_s, abs=2 * MIGRATION_S),
    }
    roomy = run(Edf(), [line("a")], memory=DeviceMemory(200.0, 40.0, 60.0))
    assert ends(roomy)["a"] == approx(AROUND_S + 2 * STEP_S[1])


def test_what_fits_nowhere_fails_and_is_refused_from_then_on() -> None:
    done = run(Edf(), [line("a"), line("b", 20.0)], memory=DeviceMemory(80.0, 40.0, 200.0))
    first, second = done.requests
    assert first.status is second.status is Status.FAILED
    assert "more device memory than there is at sp2" in first.detail and "there are 80.00 GiB" in second.detail
    assert second.end_s == 20.0 and second.rank_seconds == 0
