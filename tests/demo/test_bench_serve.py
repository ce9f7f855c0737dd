"""`gfdit bench serve`: what it sends and when, and the server's own counts beside the client's."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from gfdit.cli.bench_requests import arrivals, workload_trace
from gfdit.cli.main import main
from gfdit.cli.replay import Outcome
from gfdit.cli.server_counters import agreements, describe, ranks_and_busy_ratio, read_samples
from tests.support.fake_image_server import FakeServer, fake_server

__all__ = ["fake_server"]


def serve(server: FakeServer, *argv: str) -> int:
    return main(["bench", "serve", "--base-url", server.base_url, *argv])


def test_requests_of_one_kind(fake_server: FakeServer, tmp_path: Path) -> None:
    kind = ["--width", "96", "--height", "64", "--num-inference-steps", "3", "--cfg"]
    body = ["--extra-body", '{"quality": "high", "seed": null}']
    out = ["--goodput", "e2el:60000", "--json", str(tmp_path / "r.json"), "--metric-percentiles", "50,90"]
    assert serve(fake_server, "--model", "m", "--num-prompts", "3", *kind, *body, *out) == 0
    assert len(fake_server.seen) == 3 and len({body["prompt"] for body in fake_server.seen}) > 1
    for sent in fake_server.seen:
        assert (sent["model"], sent["size"], sent["num_inference_steps"]) == ("m", "96x64", 3)
        assert sent["quality"] == "high" and sent["true_cfg_scale"] > 1
        assert "seed" not in sent and "extra_params" not in sent
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["slo_attainment"] == 1 and result["per_class"]["t2i"]["goodput_rps"] > 0
    assert {"p50_e2el_ms", "p90_e2el_ms", "mean_e2el_ms"} <= set(result["percentile_metrics"])
    assert result["source"]["request_rate"] == "inf"


def test_arrivals_at_a_rate() -> None:
    """The mean gap is that of the rate whatever the burstiness, which is how unequal gaps are."""
    for burstiness in (0.25, 1.0, 4.0):
        times_s = arrivals(4000, 5.0, burstiness, seed=1)
        gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
        assert statistics.fmean(gaps_s) == pytest.approx(0.2, rel=0.1)
        assert statistics.stdev(gaps_s) / statistics.fmean(gaps_s) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]
    assert arrivals(5, 2.0, 1.0, seed=3) == arrivals(5, 2.0, 1.0, seed=3) != arrivals(5, 2.0, 1.0, seed=4)


def test_a_workload_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    trace = workload_trace("short --costs wan2.2-synthetic --ranks 4 --load 0.5 --num-requests 7 --seed 2")
    assert len(trace) == 7 and trace[0].num_frames > 1 and trace[0].deadline_s is not None
    assert "workload: 7 requests" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--workload: .*--loud"):
        workload_trace("short --costs wan2.2-synthetic --ranks 4 --loud 1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--width", "0"], "--width must be at least 1, got 0"),
        (["--num-frames", "9"], "--num-frames is for --task t2v and i2v, got t2i"),
        (["--mask-ratio", "0.5"], "--mask-ratio is for --task i2i, got t2i"),
        (["--request-rate", "-1"], "--request-rate must be a positive number, got -1"),
        (["--goodput", "ttft:3"], "--goodput takes e2el:MS"),
        (["--extra-body", "[1]"], "--extra-body takes a JSON object, got '[1]'"),
        (["--header", "key"], "--header takes KEY=VALUE, got 'key'"),
        (["--percentile-metrics", "ttft"], "'ttft' is unknown; allowed: e2el"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be from 0 to 100, got 101"),
        (["--trace", "t.jsonl", "--width", "64"], "--width is not for a trace"),
        (["--endpoint", "/v1/completions"], "--endpoint must end in one of"),
    ],
)
def test_what_is_wrong_is_named(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert serve(fake_server, *argv) == 2
    assert message in capsys.readouterr().err
    assert not fake_server.seen


def outcome(name: str, latency_s: float, status: int = 200, deadline_s: float | None = 2.0) -> Outcome:
    return Outcome(name, name[0], 0.0, deadline_s, 0.0, latency_s, status, "" if status == 200 else "no")


BEFORE = """\
# TYPE http_requests_total counter
http_requests_total{method="POST",status="2xx"} 3.0
gfdit_requests_total{slo_class="S",outcome="completed"} 1
gfdit_request_seconds_sum 2
gfdit_request_seconds_count 1
gfdit_rank_up{rank="0"} 1
gfdit_rank_busy_seconds_total{rank="0"} 5
"""
AFTER = """\
http_requests_total{method="POST",status="2xx"} 5.0
http_requests_total{method="GET",status="2xx"} 99 1700000000000
gfdit_requests_total{slo_class="S",outcome="completed"} 2
gfdit_requests_total{outcome="completed",slo_class="L, \\"odd\\""} 1
gfdit_requests_rejected_total{reason="admission"} 1
gfdit_request_seconds_sum 6.5
gfdit_request_seconds_count 3
gfdit_deadlines_met_total{slo_class="S"} 1
gfdit_deadlines_met_total{slo_class="L"} 0
gfdit_rank_up{rank="0"} 1
gfdit_rank_up{rank="1"} 1
gfdit_rank_busy_seconds_total{rank="0"} 8
gfdit_rank_busy_seconds_total{rank="1"} 1
not a sample
"""


def test_counts_of_the_server_beside_those_of_the_client() -> None:
    before, after = read_samples(BEFORE), read_samples(AFTER)
    rows = agreements(before, after, [outcome("S1", 1.5), outcome("L1", 3.0), outcome("S2", 0.0, status=429)])
    found: dict[str, Any] = {row.metric + row.figure: row for row in rows}
    assert (found["http_requests_totalHTTP 2xx"].client, found["http_requests_totalHTTP 2xx"].server) == (2, 2)
    assert found["gfdit_requests_totalcompleted"].difference == 0
    assert found["gfdit_requests_rejected_totalturned away"].difference == 0
    assert found["gfdit_deadlines_met_totaldeadlines met, S"].difference == 0
    # The client saw 1.5 and 3 s, the server 4.5 s in two requests.
    assert found["gfdit_request_secondsmean latency, s"].difference == pytest.approx(0.0)
    assert found["vllm_omni:requests_success_totalcompleted"].server is None
    assert "the server has no" in describe(rows) and "vllm_omni:requests_success_total" in describe(rows)
    assert ranks_and_busy_ratio(before, after, 4.0) == (2, (3 + 1) / (2 * 4.0))
    assert ranks_and_busy_ratio({}, {}, 4.0) == (None, None)


def test_a_difference_is_shown() -> None:
    rows = agreements(
        {}, read_samples("gfdit_request_seconds_sum 3\ngfdit_request_seconds_count 1"), [outcome("S", 2)]
    )
    (mean,) = [row for row in rows if row.metric == "gfdit_request_seconds"]
    assert mean.difference == 0.5 and "+50.00%" in describe(rows)
