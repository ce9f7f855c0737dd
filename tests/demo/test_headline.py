"""The benchmark's own functions: what servers are asked, the router before the replicas, and the report."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from PIL import Image

from benchmarks import headline
from benchmarks.headline import ALL, TINY, by_trace, cell, haproxy_config, lead, models_of, router, server_names
from gfdit.cli.replay import Outcome
from gfdit.cli.replay_report import summarize
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.workloads import PATTERNS
from tests.support.fake_image_server import FakeServer, fake_server, image_answer
from tests.support.waiting import HANG_S, wait_until

__all__ = ["fake_server"]


def arguments(monkeypatch: pytest.MonkeyPatch, *argv: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["headline", *argv])
    monkeypatch.setattr(shutil, "which", lambda name: name)
    return headline.parse_args()


def test_the_servers_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = server_names(arguments(monkeypatch, "--policies", "triage"))
    assert names == [
        *("gfdit triage", "stock SP2", "stock CFG2"),
        *("2 replicas, least connections", "2 replicas, one queue"),
    ]
    wide = arguments(monkeypatch, "--ranks", "8", "--no-cfg", "--policies")
    assert server_names(wide) == ["stock SP8", "8 replicas, least connections", "8 replicas, one queue"]
    assert headline.stock_cfg(8) == "stock CFG2 x SP4"


def test_a_published_model_has_the_paper_s_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(monkeypatch, "--model", "m/x", "--shapes", "480x832x49", "480x832x81", "720x1280x81")
    (model,) = models_of(args)
    assert (model.num_steps, model.grace_s, model.tiny, model.folder) == (50, 5.0, False, "m_x")
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--model", "m/x")


def test_phases_are_squeezed_together() -> None:
    short = headline.squeezed(PATTERNS["short"], 60.0)
    assert [phase.duration_s for phase in short.phases] == pytest.approx([6, 30, 18, 6])
    assert [phase.per_min for phase in short.phases] == [phase.per_min for phase in PATTERNS["short"].phases]


def result(latencies_s: Sequence[float], label: str = "x") -> dict[str, Any]:
    outcomes = [
        Outcome(f"r{index}", "S", float(index), 2.0, float(index), index + latency_s, 200)
        for index, latency_s in enumerate(latencies_s)
    ]
    source = {"source": {"date": "2026-01-01"}, "others_share": 0.25}
    return summarize(outcomes, label=label, grace_s=0.5) | source


def test_the_lead_is_taken_trace_by_trace() -> None:
    def kept(*latencies_s: float) -> dict[str, Any]:
        return headline.kept(result(latencies_s))

    servers = {
        "gfdit triage": {"short-0": kept(1, 1, 1, 9), "short-1": kept(1, 1, 1, 1), "burst-0": kept(9, 9, 9, 9)},
        "stock SP2": {"short-0": kept(2.4, 1, 9, 9), "short-1": kept(1, 1, 9, 2.6), "burst-0": kept(1, 9, 9, 9)},
    }
    assert sorted(by_trace(servers, "stock SP2", "short")) == ["short-0", "short-1"]
    assert len(by_trace(servers, "stock SP2", ALL)) == 3
    # 75 and 100 % of requests against 50 and 50 %: leads of 25 and 50 points.
    assert lead(servers, "stock SP2", "short").startswith("+37.5 ±")
    assert lead(servers, "stock SP2", "burst") == "-25.0"
    assert lead(servers, "gfdit triage", "short") == ""
    assert cell(servers, "gfdit triage", "burst", "mean, s") == "9.00"


def test_a_report_of_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From finished runs, without a server."""
    args = arguments(
        monkeypatch, "--tiny", "qwen-image", "--policies", "triage", "--seeds", "2", "--work", str(tmp_path),
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    for run in headline.runs_of(TINY["qwen-image"], args):
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.write_text(json.dumps(result([1.0, 3.0] if run.server.startswith("stock") else [1.0, 1.0])))
    load_cost_table("qwen-image-h20").save(tmp_path / "qwen-image" / "costs.json")
    monkeypatch.setattr(headline, "prepare", lambda model, args: None)
    assert headline.main() == 0
    (page,) = (tmp_path / "out").glob("headline_*.md")
    assert "| stock SP2 | 50.0 ± 0.0 | 2.00 ± 0.00 |" in page.read_text()
    assert "| +50.0 ± 0.0 |" in page.read_text()
    assert page.with_suffix(".png").exists() and page.with_suffix(".json").exists()
    assert "20 of 20 runs are done" in capsys.readouterr().out


def test_a_run_that_was_cut_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fake_server: FakeServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through ``gfdit bench serve`` itself, against a server that answers at once."""
    started: list[str] = []

    @contextmanager
    def serving(run: headline.Run, args: argparse.Namespace) -> Iterator[str]:
        started.append(run.server)
        yield fake_server.base_url

    monkeypatch.setattr(headline, "serving", serving)
    png = io.BytesIO()
    Image.new("RGB", (8, 8), "grey").save(png, "PNG")
    fake_server.answer = lambda body: image_answer(png.getvalue())
    folder = tmp_path / "work" / "qwen-image"
    table = load_cost_table("qwen-image-h20")
    fast = tuple(replace(entry, seconds=entry.seconds / 50) for entry in table.entries)
    folder.mkdir(parents=True)
    replace(table, entries=fast).save(folder / "costs.json")
    (folder / "profiled").touch()
    (folder / "model").mkdir()
    argv = ["--tiny", "qwen-image", "--policies", "triage", "--seeds", "1", "--trace-s", "0.3", "--no-cfg"]
    argv += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    arguments(monkeypatch, *argv, "--limit-s", "0")
    assert headline.main() == 0
    assert "0 of 8 runs are done" in capsys.readouterr().out and not started
    arguments(monkeypatch, *argv, "--servers", "stock SP2")
    assert headline.main() == 0
    assert started == ["stock SP2"]
    arguments(monkeypatch, *argv)
    assert headline.main() == 0
    assert started[1:] == ["gfdit triage", "2 replicas, least connections", "2 replicas, one queue"]
    told = ["gfdit" in body.get("extra_params", {}) for body in fake_server.seen if "num_inference_steps" in body]
    assert any(told) and not all(told)
    (page,) = (tmp_path / "out").glob("headline_*.md")
    assert "| gfdit triage | 100.0 |" in page.read_text() and "+0.0" in page.read_text()
    assert "4 pictures of the first trace" in page.read_text() and "stock SP2 4 (0)" not in page.read_text()
    assert "gfdit triage 4 (0)" in page.read_text()


def test_the_router_is_told_every_replica() -> None:
    config = haproxy_config(8000, [1, 2], None)
    assert "bind 127.0.0.1:8000" in config and "balance leastconn" in config
    assert "server replica0 127.0.0.1:1\n" in config and "server replica1 127.0.0.1:2\n" in config
    assert "server replica1 127.0.0.1:2 maxconn 1\n" in haproxy_config(8000, [1, 2], 1)


class Slow:
    """A server whose answers are held back until they may come."""

    def __init__(self) -> None:
        self.under_way, self.may_answer = 0, Event()
        slow = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/health":
                    slow.under_way += 1
                    slow.may_answer.wait(HANG_S)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def replicas() -> Iterator[list[Slow]]:
    servers = [Slow(), Slow()]
    yield servers
    for each in servers:
        each.may_answer.set()
        each.server.shutdown()
        each.server.server_close()


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed")
@pytest.mark.parametrize(("limit", "at_once"), [(None, 3), (1, 1)])
def test_requests_are_shared_out(replicas: list[Slow], tmp_path: Path, limit: int | None, at_once: int) -> None:
    """Six at once: three to each by their connections, and with a limit one to each while the others wait."""
    with router([each.server.server_port for each in replicas], limit, tmp_path / "r.log") as base_url:
        threads = [
            Thread(target=httpx.get, args=(base_url,), kwargs={"timeout": HANG_S, "trust_env": False})
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: [each.under_way for each in replicas] == [at_once, at_once], "each has its share")
        for each in replicas:
            each.may_answer.set()
        for thread in threads:
            thread.join(HANG_S)
    assert sum(each.under_way for each in replicas) == 6
