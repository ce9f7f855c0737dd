"""A client's view: `gfdit serve` over HTTP, with good requests, bad ones and ones that go away."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image, ImageOps

from gfdit.cli.main import main
from gfdit.observe.catalogue import METRICS
from gfdit.observe.timeline import Span, read_timeline
from tests.support.collector import Collector, http_collector
from tests.support.leftovers import nothing_left
from tests.support.openai_client import only_image, openai_client
from tests.support.server import ServerProcess, free_port, generate_image, start_server
from tests.support.waiting import HANG_S, wait_until

SIZE = (128, 128)


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http") / "timeline.json"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(model: Path, timeline: Path, collector: Collector) -> Iterator[ServerProcess]:
    argv = ["gfdit", "serve", str(model), "--ranks", "2", "--policy", "equipartition"]
    argv += ["--admission", "deadline", "--timeline", str(timeline), "--shutdown-timeout", str(HANG_S)]
    argv += ["--set", f"template_host_bytes={1 << 28}", "--set", "template_full_blocks=0"]
    # vLLM's own name of it, which its diffusion servers do not start with.
    argv += ["--", "--enforce-eager", "--dtype", "float32", "--otlp-traces-endpoint", collector.url]
    with nothing_left() as left, start_server(argv, free_port(), timeline.with_name("log")) as server:
        left.watch(server.process.pid, server.port)
        yield server
        left.watch(server.process.pid)


def generate(server: ServerProcess, extra: dict[str, Any] | None = None, size: tuple[int, int] = SIZE) -> Any:
    return generate_image(server.base_url, "a red panda", size, steps=4, seed=1, extra_params=extra)


def body_of(side: int, steps: int) -> dict[str, Any]:
    return {"prompt": "a red panda", "size": f"{side}x{side}", "num_inference_steps": steps, "seed": 1}


def post(
    server: ServerProcess, extra: dict[str, Any] | None = None, side: int = 256, steps: int = 4
) -> httpx.Response:
    body = body_of(side, steps) | ({"extra_params": extra} if extra else {})
    url = f"{server.base_url}/v1/images/generations"
    return httpx.post(url, json=body, timeout=HANG_S, trust_env=False)


def test_metrics_are_there_before_the_first_request(server: ServerProcess) -> None:
    """Of every family, with zeros; the ranks are up, and requests may come."""
    text = get(server, "/metrics").text
    assert not [one.name for one in METRICS if f"# TYPE {one.name} {one.kind}" not in text]
    wait_until(lambda: metric(server, "gfdit_rank_up") == [1, 1], "the control process has told of its ranks")
    assert set(metric(server, "gfdit_requests_total") + metric(server, "gfdit_task_seconds_count")) == {0.0}
    assert get(server, "/v1/gfdit/ready").json() == {"ready": True, "reason": None}


def test_an_image_with_every_option(server: ServerProcess) -> None:
    options = {"deadline_ms": 600_000, "slo_class": "interactive", "priority": 5, "max_sp": 1}
    status, image = generate(server, {"gfdit": options})
    assert status == 200 and image.size == SIZE
    assert generate(server)[1].tobytes() == image.tobytes()


def test_a_request_is_in_its_clients_trace(server: ServerProcess, collector: Collector) -> None:
    """With its own id and the client's; what it says in the log begins as vLLM's lines do."""
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "a=b", "x-request-id": "order/17"}
    options = {"deadline_ms": 600_000, "slo_class": "interactive"}
    body = body_of(128, steps=4) | {"extra_params": {"gfdit": options}}
    url = f"{server.base_url}/v1/images/generations"
    assert httpx.post(url, json=body, headers=headers, timeout=HANG_S, trust_env=False).status_code == 200
    wait_until(lambda: [one for one in collector.of(trace) if one.name == "request"], "the request's span")
    (root,) = [one for one in collector.of(trace) if one.name == "request"]
    assert (root.parent, root.state, root.resource["gfdit.policy"]) == (parent, "a=b", "equipartition")
    of_request = {name.removeprefix("gfdit.request."): value for name, value in root.attributes.items()}
    assert of_request["client_id"] == "order_17" and "-order_17-" in of_request["id"]
    wanted = {"outcome": "completed", "met": True, "slo_class": "interactive", "size": "128x128", "steps": 4}
    assert wanted.items() <= of_request.items() and of_request["deadline_s"] == pytest.approx(600)
    tasks = [one for one in collector.of(trace) if one.name not in ("request", "migrate")]
    assert {one.parent for one in tasks} == {root.id}
    steps = sorted([one.attributes["gfdit.task.step"] for one in tasks if one.name == "denoise"])
    assert steps == [0, 1, 2, 3] and {"encode", "decode"} <= {one.name for one in tasks}
    assert all(root.start_ns <= one.start_ns < one.end_ns <= root.end_ns + 1e6 for one in tasks)
    assert metric(server, "gfdit_spans_total")[0] >= 1 + len(tasks)
    assert re.search(r"(?m)INFO .*warmed up in \d+ items", server.log_path.read_text()), "of gfdit, at INFO"


def test_a_client_without_a_trace_gets_one(server: ServerProcess, collector: Collector) -> None:
    before = {one.id for one in collector.named("request")}
    assert generate(server)[0] == 200
    wait_until(lambda: len(collector.named("request")) > len(before), "the request's span")
    (root,) = [one for one in collector.named("request") if one.id not in before]
    assert root.parent == "" and "gfdit.request.client_id" not in root.attributes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_ms": -1}, "gfdit.deadline_ms must be a positive number"),
        ({"deadline_ms": "soon"}, "gfdit.deadline_ms must be a positive number"),
        ({"deadline_ms": True}, "gfdit.deadline_ms must be a positive number"),
        ({"priority": 1.5}, "gfdit.priority must be an integer"),
        ({"max_sp": 0}, "gfdit.max_sp must be a positive integer"),
        ({"min_sp": 0.5}, "gfdit.min_sp must be a positive integer"),
        ({"min_sp": 2, "max_sp": 1}, "gfdit.min_sp must be at most max_sp, 1, got 2"),
        ({"min_sp": 64}, "min_sp is 64, but the sequence-parallel degrees of this request are 1, 2"),
        ({"slo_class": 3}, "gfdit.slo_class must be a string"),
        ({"deadline": 1}, "gfdit.deadline is unknown, allowed: deadline_ms, slo_class, priority, min_sp, max_sp"),
        ("fast", "gfdit must be an object"),
    ],
)
def test_bad_options_are_named(server: ServerProcess, options: Any, message: str) -> None:
    status, error = generate(server, {"gfdit": options})
    assert status == 400 and message in json.dumps(error)


def test_admission_turns_away_what_cannot_be_in_time(server: ServerProcess) -> None:
    status, error = generate(server, {"gfdit": {"deadline_ms": 0.01}})
    assert status == 429 and "on an idle machine, the deadline allows 0.0 s" in json.dumps(error)
    assert post(server, {"gfdit": {"deadline_ms": 0.01}}).headers["retry-after"] == "1"
    assert generate(server, {"gfdit": {"deadline_ms": 600_000}})[0] == 200


@pytest.mark.parametrize("size", [(200_000, 128), (100_000, 100_000), (0, 128)])
def test_a_size_the_model_cannot_take(server: ServerProcess, size: tuple[int, int]) -> None:
    status, _ = generate(server, size=size)
    assert 400 <= status < 500
    assert generate(server)[0] == 200


def png(image: Image.Image) -> tuple[str, bytes, str]:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "image.png", buffer.getvalue(), "image/png"


def edit(server: ServerProcess, files: dict[str, Any], **fields: str) -> httpx.Response:
    form = {"prompt": "a red panda", "num_inference_steps": "4", "seed": "1", "strength": "0.8", **fields}
    url = f"{server.base_url}/v1/images/edits"
    return httpx.post(url, data=form, files=files, timeout=HANG_S, trust_env=False)


def edited(answer: httpx.Response) -> Image.Image:
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))


def test_an_edit_reads_what_an_earlier_one_had_recorded(server: ServerProcess) -> None:
    """The first one computes all tokens; what it lacked is recorded behind it, and read by the next."""
    template, mask = Image.linear_gradient("L").resize(SIZE).convert("RGB"), Image.new("L", SIZE)
    mask.paste(255, (32, 48, 96, 112))
    files = {"image": png(template), "mask_image": png(mask)}

    def make(**options: Any) -> Image.Image:
        return edited(edit(server, files, extra_params=json.dumps({"gfdit": {"edit": options}})))

    exact, own = make(), make(mode="own")
    assert own.tobytes() != exact.tobytes()
    first = make(mode="cached")
    wait_until(lambda: sum(events(server, "kept")) > 0, "templates are recorded")
    wait_until(lambda: sum(events(server, "hits")) > 0 or (make(mode="cached"), False)[1], "templates are read")
    read = make(mode="cached")
    difference = np.abs(np.asarray(read, int) - np.asarray(first, int)).max()
    assert difference <= 16, difference
    del files["mask_image"]
    itself = make(mode="record")
    assert np.abs(np.asarray(itself, int) - np.asarray(template, int)).max() <= 1


def test_an_edit_under_a_mask(server: ServerProcess) -> None:
    """With vLLM-Omni's name and polarity of the mask, and with OpenAI's: one image, in the template."""
    template = Image.linear_gradient("L").resize(SIZE).convert("RGB")
    white = Image.new("L", SIZE)
    white.paste(255, (32, 48, 96, 112))
    holes = template.convert("RGBA")
    holes.putalpha(ImageOps.invert(white))
    edited = []
    for name, mask in (("mask_image", white), ("mask", holes)):
        answer = edit(server, {"image": png(template), name: png(mask)})
        assert answer.status_code == 200, answer.text
        edited.append(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))
    assert edited[0].tobytes() == edited[1].tobytes()
    changed = np.abs(np.asarray(edited[0], int) - np.asarray(template)).max(-1)
    painted = np.asarray(white) > 0
    assert not changed[~painted].any() and changed[painted].mean() > 10


def test_bad_edits_are_named(server: ServerProcess) -> None:
    image, mask = png(Image.new("RGB", SIZE)), png(Image.new("L", SIZE, 255))
    for files, fields, message in (
        ({"image": image, "mask": mask, "mask_image": mask}, {}, "mask and mask_image are two names of one field"),
        ({"image": image, "mask": png(Image.new("L", SIZE))}, {}, "mask_image covers nothing"),
        ({"image": image, "mask": mask}, {"strength": "2"}, "strength must be above 0 and at most 1, got 2"),
        ({"image": image, "mask": mask}, {"extra_params": "[]"}, "extra_params must be a JSON object"),
        ({"image": image}, {"extra_params": '{"gfdit": {"deadline_ms": -1}}'}, "gfdit.deadline_ms must be"),
    ):
        answer = edit(server, files, **fields)
        assert answer.status_code == 400 and message in answer.text, answer.text


def events(server: ServerProcess, event: str) -> list[float]:
    """Of the template store, one for each rank that has told."""
    lines = get(server, "/metrics").text.splitlines()
    return [
        float(line.split()[-1])
        for line in lines
        if line.startswith("gfdit_template_events{") and f'event="{event}"' in line
    ]


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(f"{server.base_url}{path}", timeout=HANG_S, trust_env=False)


def metric(server: ServerProcess, name: str) -> list[float]:
    """Its values, one for each rank if it has ranks."""
    lines = get(server, "/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]


def test_a_client_that_disconnects_frees_its_ranks_within_one_step(server: ServerProcess, timeline: Path) -> None:
    """Seen in the timeline, where it is the only request with so many steps, and in the metrics."""

    def far_spans() -> list[Span]:
        return [span for span in read_timeline(timeline) if span.step > 4]

    assert not far_spans()
    connection = HTTPConnection("127.0.0.1", server.port)
    body, headers = json.dumps(body_of(512, steps=200)), {"Content-Type": "application/json"}
    connection.request("POST", "/v1/images/generations", body, headers)
    wait_until(far_spans, "the request runs")
    wait_until(lambda: any(metric(server, "gfdit_artifact_bytes")), "the metrics show its artifacts")
    connection.close()
    wait_until(lambda: metric(server, "gfdit_artifact_bytes") == [0, 0], "its artifacts are freed")
    assert generate(server)[0] == 200
    left = far_spans()[-1].request
    wait_until(lambda: read_timeline(timeline)[-1].request != left, "the timeline has what came after it")
    of_it = [span for span in read_timeline(timeline) if span.request == left]
    assert "decode" not in {span.kind for span in of_it} and max(span.step for span in of_it) < 199


def test_metrics_are_right_after_some_requests(server: ServerProcess) -> None:
    def sums() -> dict[str, float]:
        names = ("gfdit_request_seconds_count", "gfdit_requests_total", "gfdit_deadlines_met_total")
        return {name: sum(metric(server, name)) for name in names}

    def steps_done() -> float:
        lines = get(server, "/metrics").text.splitlines()
        found = [
            line for line in lines if line.startswith("gfdit_task_seconds_count{") and 'kind="denoise"' in line
        ]
        return sum(float(line.split()[-1]) for line in found)

    # What has been recorded of templates comes after the answers to edits.
    wait_until(lambda: not get(server, "/v1/gfdit/requests").json()["requests"], "nothing is alive")
    before, steps = sums(), steps_done()
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda _: generate(server, {"gfdit": {"deadline_ms": 600_000}})[0], range(3))
        assert list(answers) == [200] * 3
    assert {name: value - before[name] for name, value in sums().items()} == dict.fromkeys(before, 3)
    wait_until(lambda: steps_done() >= steps + 3 * 4 / 3, "steps are counted, some of them in batches")
    load = get(server, "/v1/gfdit/load").json()
    assert (load["live_ranks"], load["alive"], load["backlog_rank_s"], load["reason"]) == (2, 0, 0.0, None)
    assert min(metric(server, "gfdit_rank_busy_seconds_total")) > 0
    assert set(metric(server, "vllm_omni:num_requests_running")) == {0.0}


def test_a_client_under_load_counts_what_the_server_counts(server: ServerProcess, tmp_path: Path) -> None:
    """`gfdit bench serve` with the server's own counters beside its own."""
    argv = ["bench", "serve", "--base-url", server.base_url, "--width", "128", "--height", "128", "--slo"]
    argv += ["--num-inference-steps", "2", "--num-prompts", "4", "--goodput", "e2el:600000"]
    assert main([*argv, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = {(one["metric"], one["figure"]): one for one in result["server"]["figures"]}
    for metric, figure, count in (
        ("http_requests_total", "HTTP 2xx", 4),
        ("gfdit_requests_total", "completed", 4),
        ("gfdit_requests_rejected_total", "turned away", 0),
        ("gfdit_deadlines_met_total", "deadlines met, t2i", 4),
    ):
        assert (figures[metric, figure]["client"], figures[metric, figure]["server"]) == (count, count)
    mean = figures["gfdit_request_seconds", "mean latency, s"]
    assert 0 < mean["server"] <= mean["client"]
    assert result["ranks"] == 2 and 0 < result["rank_busy_ratio"] <= 1


def test_the_openai_client(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"num_inference_steps": 4, "seed": 1}
    with openai_client(server) as client:
        made = client.images.generate(
            prompt="a red panda", size="128x128", response_format="b64_json", extra_body=fields
        )
        assert only_image(made).tobytes() == generate(server)[1].tobytes()
        with pytest.raises(openai.BadRequestError, match=r"gfdit\.priority must be an integer"):
            bad = {"extra_params": {"gfdit": {"priority": "high"}}}
            client.images.generate(prompt="a red panda", size="128x128", extra_body=fields | bad)
        with pytest.raises(openai.RateLimitError) as refused:
            late = {"extra_params": {"gfdit": {"deadline_ms": 0.01}}}
            client.images.generate(prompt="a red panda", size="128x128", extra_body=fields | late)
        assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_the_example_watches_its_requests(server: ServerProcess) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "06_serve_and_watch.py"
    command = [sys.executable, str(example), "--url", server.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    (took_s,) = re.findall(r"^large: HTTP 200 after (.*) s", done.stdout, re.MULTILINE)
    looked = re.search(r"^  large: \w+ on \d ranks, \d+ of 40 steps, ", done.stdout, re.MULTILINE)
    assert looked or float(took_s) < 2, "it looks every second"
    assert re.findall(r"^(large|small|urgent): HTTP 200 ", done.stdout, re.MULTILINE) == [
        "large",
        "small",
        "urgent",
    ]


def test_healthy_after_all_that(server: ServerProcess) -> None:
    assert httpx.get(f"{server.base_url}/health", timeout=HANG_S, trust_env=False).status_code == 200
    assert generate(server)[0] == 200
    wait_until(lambda: metric(server, "gfdit_artifact_bytes") == [0, 0], "nothing is held any more")


def test_a_server_that_is_told_to_stop_ends_what_runs(server: ServerProcess) -> None:
    """The last test. Others are turned away; told once more it does not wait for the rest; nothing is left."""

    def num_inside() -> float:
        return sum(sum(metric(server, f"vllm_omni:num_requests_{state}")) for state in ("running", "waiting"))

    def health() -> int:
        return httpx.get(f"{server.base_url}/health", timeout=HANG_S, trust_env=False).status_code

    with ThreadPoolExecutor() as pool:
        long = pool.submit(post, server, side=1024, steps=200)
        wait_until(lambda: num_inside() == 1, "the long request has arrived")
        short = pool.submit(post, server, steps=100)
        while num_inside() < 2:
            if short.done():  # before anybody looked
                short = pool.submit(post, server, steps=100)
        server.process.terminate()
        wait_until(lambda: health() == 503, "the server says that it stops")
        ready = get(server, "/v1/gfdit/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        turned_away = post(server)
        assert short.result().status_code == 200
        assert not long.done()
        server.process.terminate()
        for refused in (turned_away, long.result()):
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert error["code"] == 503 and "the server is shutting down" in error["message"]
    assert server.process.wait(HANG_S) == 0
