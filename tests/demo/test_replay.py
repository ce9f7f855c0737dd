"""The replay client against a small server: when it sends, what it sends, and what it makes of the answers."""

import asyncio
import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gfdit.cli.http_requests import CHAT_PATH, EDITS_PATH, IMAGES_PATH, VIDEOS_PATH, generation, prompt_of, seed_of
from gfdit.cli.main import main
from gfdit.cli.replay import Outcome, ReplayOptions, replay
from gfdit.cli.replay_report import summarize
from gfdit.sim.trace import TraceRequest, write_trace
from tests.support.fake_image_server import FakeServer, fake_server, image_answer
from tests.support.waiting import HANG_S

__all__ = ["fake_server"]


def trace_request(name: str, arrival_s: float = 0.0, **changes: Any) -> TraceRequest:
    return replace(TraceRequest(name, arrival_s, "m", 128, 192, 1, 4, slo_class="S"), **changes)


def test_requests_are_sent_when_they_are_due_and_do_not_wait_for_each_other(fake_server: FakeServer) -> None:
    all_here = threading.Barrier(3, timeout=HANG_S)

    def together(body: dict[str, Any]) -> tuple[int, str]:
        all_here.wait()  # nobody is answered before the last one has arrived
        return image_answer(b"x")

    fake_server.answer = together
    trace = [trace_request(f"r{i}", arrival_s) for i, arrival_s in enumerate((0.1, 0.2, 0.4))]
    done: list[str] = []
    outcomes = replay(trace, ReplayOptions(fake_server.base_url), lambda outcome: done.append(outcome.id))
    assert sorted(done) == [outcome.id for outcome in outcomes] == ["r0", "r1", "r2"]
    for outcome, request in zip(outcomes, trace, strict=True):
        assert outcome.completed
        assert outcome.sent_s >= request.arrival_s, "sent early"
        assert outcome.finish_s >= 0.4
        assert outcome.latency_s == pytest.approx(outcome.finish_s - request.arrival_s)


def test_nobody_waits_longer_than_for_the_arrival(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still while requests wait."""
    waits_s: list[float] = []

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("gfdit.cli.replay.time", clock)
    monkeypatch.setattr("gfdit.cli.replay.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    trace = [trace_request("r0", 3.0), trace_request("r1", 7000.0)]
    assert all(outcome.completed for outcome in replay(trace, ReplayOptions(fake_server.base_url)))
    assert waits_s == pytest.approx([3.0, 7000.0])


def test_the_same_trace_asks_every_server_for_the_same_images(fake_server: FakeServer) -> None:
    trace = [trace_request("a"), trace_request("b", 0.05)]
    first = replay(trace, ReplayOptions(fake_server.base_url))
    second = replay(trace, ReplayOptions(fake_server.base_url))
    bodies = fake_server.seen
    assert bodies[:2] == bodies[2:]
    assert bodies[0]["size"] == "192x128", "the endpoint wants width first"
    assert bodies[0]["seed"] == seed_of("a") != seed_of("b")
    assert [outcome.image for outcome in first] == [outcome.image for outcome in second]
    assert first[0].image == b"png of " + prompt_of("a").encode()


def test_only_gfdit_is_told_the_deadline() -> None:
    request = trace_request("a", deadline_s=2.5, priority=3)
    assert "extra_params" not in body_of(request)
    sent = body_of(request, send_slo=True)["extra_params"]
    assert sent == {"gfdit": {"deadline_ms": 2500.0, "slo_class": "S", "priority": 3}}
    assert "deadline_ms" not in body_of(trace_request("a"), send_slo=True)["extra_params"]["gfdit"]
    slo = {"deadline_ms": 2500.0, "slo_class": "S", "priority": 3}
    video = generation(replace(request, num_frames=5), send_slo=True).arguments["data"]
    assert json.loads(video["extra_params"]) == {"gfdit": slo}
    edit = generation(request, send_slo=True, input_image=b"png").arguments["json"]
    assert edit["extra_body"]["extra_args"] == {"gfdit": slo}


def test_the_model_gets_its_own_parameters() -> None:
    request, own = trace_request("a"), {"sample_solver": "euler"}
    image = generation(request, send_slo=False, extra_params=own).arguments["json"]
    assert image["extra_params"] == own
    video = generation(replace(request, num_frames=5), send_slo=True, extra_params=own).arguments["data"]
    assert json.loads(video["extra_params"]) == {"gfdit": {"slo_class": "S", "priority": 0}} | own
    edit = generation(request, send_slo=False, input_image=b"png", extra_params=own).arguments["json"]
    assert edit["extra_body"]["extra_args"] == own


def body_of(request: TraceRequest, send_slo: bool = False) -> Any:
    return generation(request, send_slo=send_slo).arguments["json"]


def test_guidance() -> None:
    guided = body_of(trace_request("a", cfg=True))
    assert guided["negative_prompt"] and guided["true_cfg_scale"] == guided["guidance_scale"] > 1
    assert body_of(trace_request("a"))["guidance_scale"] == 0
    video = generation(trace_request("a", num_frames=5), send_slo=False)
    assert video.arguments["data"]["guidance_scale"] == 0
    video = generation(trace_request("a", num_frames=5, cfg=True), send_slo=False)
    assert video.arguments["data"]["guidance_scale"] > 1


def test_every_kind_of_request_has_its_endpoint() -> None:
    image, video = trace_request("a"), trace_request("a", num_frames=5)
    assert generation(image, send_slo=False).path == IMAGES_PATH
    edit = generation(image, send_slo=False, input_image=b"png")
    assert edit.path == CHAT_PATH
    text, picture = edit.arguments["json"]["messages"][0]["content"]
    assert text["text"] == prompt_of("a")
    assert picture["image_url"]["url"] == "data:image/png;base64,cG5n"
    for input_image in (None, b"png"):
        moving = generation(video, send_slo=False, input_image=input_image)
        assert moving.path == VIDEOS_PATH and moving.arguments["data"]["num_frames"] == 5
        assert bool(moving.arguments["files"]) == bool(input_image)


def test_edits_of_a_template_bring_it_and_their_own_mask() -> None:
    one = trace_request("a", mask_ratio=0.3, template="t1", strength=0.5, deadline_s=2.0)
    other = replace(one, id="b", mask_ratio=0.6)
    first, second = (generation(each, send_slo=True).arguments for each in (one, other))
    assert generation(one, send_slo=False).path == EDITS_PATH
    assert first["data"]["prompt"] == second["data"]["prompt"], "or what is kept of it would be of no use"
    assert first["data"]["seed"] != second["data"]["seed"] and first["data"]["strength"] == 0.5
    assert json.loads(first["data"]["extra_params"])["gfdit"]["deadline_ms"] == 2000.0
    assert first["files"]["image"] == second["files"]["image"]
    masks = [Image.open(io.BytesIO(each["files"]["mask_image"][1])) for each in (first, second)]
    assert [mask.size for mask in masks] == [(one.width, one.height)] * 2
    painted = [np.asarray(mask).mean() / 255 for mask in masks]
    rows = one.height // 16
    assert painted == pytest.approx([round(ratio * rows) / rows for ratio in (0.3, 0.6)])
    assert (
        generation(replace(one, template="t2"), send_slo=False).arguments["files"]["image"]
        != first["files"]["image"]
    )


def test_answers_are_read() -> None:
    chat = {"choices": [{"message": {"content": [{"image_url": {"url": "data:image/png;base64,cG5n"}}]}}]}
    edit = generation(trace_request("a"), send_slo=False, input_image=b"png")
    assert edit.read(httpx.Response(200, json=chat)) == b"png"
    video = generation(trace_request("a", num_frames=5), send_slo=False)
    assert video.read(httpx.Response(200, content=b"mp4", headers={"content-type": "video/mp4"})) == b"mp4"
    with pytest.raises(ValueError, match="content type application/json"):
        video.read(httpx.Response(200, json={}))


def test_every_failure_is_an_outcome(fake_server: FakeServer) -> None:
    answers = {
        "ok": image_answer(b"x"),
        "busy": (429, "later"),
        "broken": (500, "no rank left"),
        "cut": (0, ""),
        "nonsense": (200, "{}"),
    }
    by_seed = {seed_of(name): answer for name, answer in answers.items()}
    fake_server.answer = lambda body: by_seed[body["seed"]]
    outcomes = {
        outcome.id: outcome
        for outcome in replay([trace_request(name) for name in answers], ReplayOptions(fake_server.base_url))
    }
    assert {name for name, outcome in outcomes.items() if outcome.completed} == {"ok"}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "ok": 200,
        "busy": 429,
        "broken": 500,
        "cut": 0,
        "nonsense": 200,
    }
    assert outcomes["broken"].error == "no rank left"
    assert "not an image" in outcomes["nonsense"].error
    result = summarize(list(outcomes.values()), label="x")
    assert (result["num_requests"], result["num_completed"], result["num_rejected"]) == (5, 1, 1)
    assert result["slo_attainment"] == 1 / 5


def test_a_server_that_is_silent_or_absent_is_an_outcome(fake_server: FakeServer) -> None:
    given_up = threading.Event()

    def stuck(body: dict[str, Any]) -> tuple[int, str]:
        given_up.wait(HANG_S)
        return 200, ""

    fake_server.answer = stuck
    (late,) = replay([trace_request("a")], ReplayOptions(fake_server.base_url, request_timeout_s=0.2))
    given_up.set()
    assert (late.status, late.error) == (0, "no answer in time")
    (absent,) = replay([trace_request("a")], ReplayOptions("http://127.0.0.1:9"))
    assert absent.status == 0 and "Connect" in absent.error


def outcome(name: str, arrival_s: float, finish_s: float, deadline_s: float | None, status: int = 200) -> Outcome:
    error = "" if status == 200 else "no"
    return Outcome(name, name[0], arrival_s, deadline_s, arrival_s, finish_s, status, error)


def test_summary_against_arithmetic_by_hand() -> None:
    outcomes = [
        outcome("S1", 1.0, 2.0, 1.5),  # 1 s, in time
        outcome("S2", 2.0, 5.0, 2.5),  # 3 s, in time with a grace of 0.5 s
        outcome("L1", 3.0, 5.0, None),  # 2 s, no deadline
        outcome("L2", 4.0, 10.0, 4.0),  # 6 s, late
        outcome("L3", 4.0, 11.0, 20.0, status=500),  # failed: a miss, but it ends the window
    ]
    result = summarize(outcomes, label="stock", grace_s=0.5)
    assert result["policy"] == "stock"
    assert result["slo_attainment"] == 2 / 5
    assert result["slo_attainment_grace"] == 3 / 5
    assert result["mean_latency_s"] == (1 + 3 + 2 + 6) / 4
    assert result["p50_latency_s"] == 2.5
    # Linear interpolation between the third and the fourth of (1, 2, 3, 6): position 3 * 0.95 = 2.85.
    assert result["p95_latency_s"] == pytest.approx(3 + 0.85 * 3)
    assert result["throughput_rps"] == 4 / (11 - 1)
    assert result["per_class"]["S"]["mean_latency_s"] == 2
    assert result["per_class"]["L"]["num_completed"] == 2
    assert [entry["met_deadline"] for entry in result["requests"]] == [True, False, True, False, False]
    assert result["requests"][4]["finish_s"] is None
    json.dumps(result)


def test_summary_of_a_server_that_answered_nothing() -> None:
    result = summarize([outcome("S1", 0.0, 1.0, None, status=500)], label="x")
    assert (result["mean_latency_s"], result["slo_attainment"], result["throughput_rps"]) == (None, 0, 0)
    with pytest.raises(ValueError, match="no requests"):
        summarize([], label="x")


def test_command(fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", [trace_request("../a"), trace_request("b")])
    files = ["--trace", str(tmp_path / "t.jsonl"), "--json", str(tmp_path / "r.json")]
    argv = ["bench", "serve", "--base-url", fake_server.base_url, *files, "--images", str(tmp_path / "images")]
    assert main(argv) == 0
    assert "2/2 completed" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["num_completed"] == 2
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [".._a.png", "b.png"]
    fake_server.answer = lambda body: (503, "gone")
    assert main(argv) == 1
    assert "2 x HTTP 503: gone" in capsys.readouterr().out


def test_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"]) == 2
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["bench"]) == 2
    assert main(["bench", "nothing"]) == 2
    assert main(["bench", "serve", "--base-url", "http://x", "--trace", "absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
