"""A client's view: `gfdit serve` over HTTP, with good requests, bad ones and ones that go away."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image, ImageOps

from gfdit.cli.main import main
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.core.tasks import TaskKind
from gfdit.observe.catalogue import METRICS
from gfdit.observe.timeline import Span, read_timeline
from gfdit.omni.http_operations import REFUSED, WITHOUT_PROFILER
from tests.support import local_http
from tests.support.browser import needs_chromium, open_page
from tests.support.collector import Collector, http_collector
from tests.support.leftovers import nothing_left
from tests.support.openai_client import only_image, openai_client
from tests.support.server import KEY, ServerProcess, free_port, generate_image, start_server
from tests.support.waiting import HANG_S, wait_until

SIZE = (128, 128)
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


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
    argv += [
        "--",
        "--enforce-eager",
        "--dtype",
        "float32",
        "--api-key",
        KEY,
        "--otlp-traces-endpoint",
        collector.url,
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # has vLLM's calls for developers
    with nothing_left() as left, start_server(argv, free_port(), timeline.with_name("log"), env=env) as server:
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
    return call(server, "/v1/images/generations", json=body)


def call(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return local_http.post(f"{server.base_url}{path}", headers=WITH_KEY, **body)


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
    assert local_http.post(url, json=body, headers={**WITH_KEY, **headers}).status_code == 200
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
    return call(server, "/v1/images/edits", data=form, files=files)


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
    return local_http.get(f"{server.base_url}{path}", headers=WITH_KEY)


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
    body, headers = json.dumps(body_of(512, steps=200)), {**WITH_KEY, "Content-Type": "application/json"}
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
    argv += ["--header", f"Authorization=Bearer {KEY}"]
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
    # Busy seconds are told about once a second: those of a run this short before it, or after it.
    assert result["ranks"] == 2 and result["rank_busy_ratio"] is not None


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
    command = [sys.executable, str(example), "--url", server.base_url, "--api-key", KEY]
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


def admin(server: ServerProcess, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What `gfdit admin` says is in force."""
    assert main(["admin", "--url", server.base_url, "--api-key", KEY, *words]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


def write_costs(server: ServerProcess, path: Path) -> Path:
    """A table that knows all that the server's model does, on either rank or both."""
    (model,) = {one["model"] for one in get(server, "/v1/gfdit/load").json()["services"]}
    specs = [
        (sp, branches, cfg) for cfg in (False, True) for sp in (1, 2) for branches in (1, 2) if cfg or branches < 2
    ]
    entries = [
        CostEntry(model, kind, side, side, 1, cfg, sp, branches, 1, 0.1 * side)
        for kind in TaskKind
        for side in (64, 1024)
        for sp, branches, cfg in specs
    ]
    CostTable("this machine", "a test", 0.0, 1e9, tuple(entries)).save(path)
    return path


def test_everything_is_changed_while_requests_run(
    server: ServerProcess, timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None fails, and images stay what they are, whatever the degree."""
    image = np.asarray(generate(server)[1], int)
    before = admin(server, capsys, "show")
    answers: list[tuple[int, float]] = []
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            status, made = generate(server, {"gfdit": {"deadline_ms": 600_000}})
            answers.append((status, np.abs(np.asarray(made, int) - image).max() if status == 200 else 255))

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(client) for _ in range(2)]
        try:
            for change in (
                "policy fcfs --policy-arg group_size=2",
                "drain-rank 1 --wait",
                "policy triage --policy-arg price=4",
                "add-rank 1",
                "admission none",
                f"costs {write_costs(server, tmp_path / 'costs')}",
                "limits max_requests=64 max_queue_s=600 max_steps=200",
                "timeline off",
                "drain-rank 0 --wait",
                "policy edf",
                "add-rank 0",
                "costs none",
                "timeline on",
                "limits max_requests=1024 max_queue_s=none max_steps=1000",
                "policy equipartition",
                "admission deadline",
            ):
                done, state = len(answers), admin(server, capsys, *change.split())
                if change.startswith("drain-rank"):
                    up = [one["state"] for one in get(server, "/v1/gfdit/state").json()["rank_states"]]
                    assert up[int(change.split()[1])] == "drained" and sorted(up) == ["drained", "up"]
                wait_until(partial(answers.__getitem__, slice(done + 1, None)), f"requests end after {change}")
        finally:
            is_over.set()
        for each in clients:
            each.result()
    assert {status for status, _ in answers} == {200} and max(difference for _, difference in answers) <= 1
    assert state == before
    assert {span.kind for span in read_timeline(timeline)} >= {"denoise"}
    assert timeline.with_name(f"{timeline.name}.1").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("policy", "quickest"), "policy 'quickest' is neither installed nor that of the server's start"),
        (("policy", "triage", "--policy-arg", "prize=4"), "policy triage has no argument 'prize'"),
        (("limits", "max_requests=0"), "gfdit setting 'max_requests' is 0: expected int >= 1"),
        (("drain-rank", "0", "1"), "0 live ranks would be left"),
        (("recording", "on"), "the server was started without --record FILE"),
    ],
)
def test_what_cannot_be_changed_is_a_line(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    before = admin(server, capsys, "show")
    assert main(["admin", "--url", server.base_url, "--api-key", KEY, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gfdit admin: error: {line}") and error.count("\n") == 1
    assert admin(server, capsys, "show") == before


def test_a_drained_server(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """What runs ends, others are turned away, and it is healthy; then it serves again."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(post, server, steps=60)
        wait_until(lambda: get(server, "/v1/gfdit/requests").json()["requests"], "a request runs")
        assert admin(server, capsys, "drain")["drain"] == "true"
        assert get(server, "/v1/gfdit/ready").json() == {"ready": False, "reason": "draining"}
        assert get(server, "/health").status_code == 200
        refused = post(server)
        assert refused.status_code == 503 and refused.headers["retry-after"] and "drained" in refused.text
        assert admin(server, capsys, "drain", "--wait")["drain"] == "true"
        assert running.result().status_code == 200
    assert admin(server, capsys, "undrain")["drain"] == "false"
    assert generate(server)[0] == 200


@needs_chromium
def test_the_page_shows_the_server_and_switches_its_policy(server: ServerProcess, tmp_path: Path) -> None:
    with open_page(f"{server.base_url}/v1/gfdit/ui", tmp_path) as page:
        wait_until(lambda: page.text("head") == "the server asks for a key", "the page has asked")
        assert page.run("document.getElementById('policy-form').hidden") is True
        page.submit("key-form", key="guess")
        wait_until(lambda: page.text("head") == "this key is not the server's", "a wrong key is refused")
        page.submit("key-form", key=KEY)
        wait_until(lambda: "ready · policy equipartition · 2 of 2 ranks" in page.text("head"), "the page shows it")
        assert page.run("document.querySelectorAll('#ranks tr canvas').length") == 2
        with ThreadPoolExecutor() as pool:
            running = pool.submit(post, server, {"gfdit": {"slo_class": "interactive"}}, steps=100)
            wait_until(lambda: "interactive" in page.text("requests"), "its request is shown")
            page.submit("policy-form", policy="quickest")
            wait_until(lambda: "neither installed" in page.text("said"), "what cannot be is a line")
            page.submit("policy-form", policy="fcfs", arguments="group_size=2")
            wait_until(lambda: page.text("said") == "policy fcfs is in force", "the policy is switched")
            wait_until(lambda: "policy fcfs" in page.text("head"), "another policy decides")
            assert running.result().status_code == 200
        page.submit("policy-form", policy="equipartition", arguments="")
        wait_until(lambda: page.text("said") == "policy equipartition is in force", "and back")
        assert "interactive" in page.text("classes")


def test_vllm_omnis_own_calls_work_or_are_refused_in_a_line(server: ServerProcess) -> None:
    """Then the server is as it was."""
    for path, line in {**REFUSED, **WITHOUT_PROFILER}.items():
        answer = call(server, path, json={"stage_ids": [0], "lora_name": "a", "lora_path": "/a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (501, line), path
    assert generate(server)[0] == 200
    with ThreadPoolExecutor() as pool:
        for mode in ("abort", "keep"):
            assert call(server, f"/pause?mode={mode}").status_code == 200
            assert get(server, "/v1/gfdit/ready").json()["reason"] == "paused"
            held = pool.submit(generate, server)
            assert get(server, "/health").status_code == 200 and not held.done()
            assert call(server, "/resume").status_code == 200
            assert held.result()[0] == 200
    assert get(server, "/v1/gfdit/ready").status_code == 200


def test_healthy_after_all_that(server: ServerProcess) -> None:
    assert local_http.get(f"{server.base_url}/health").status_code == 200
    assert generate(server)[0] == 200
    wait_until(lambda: metric(server, "gfdit_artifact_bytes") == [0, 0], "nothing is held any more")


def test_a_server_that_is_told_to_stop_ends_what_runs(server: ServerProcess) -> None:
    """The last test. Others are turned away; told once more it does not wait for the rest; nothing is left."""

    def num_inside() -> float:
        return sum(sum(metric(server, f"vllm_omni:num_requests_{state}")) for state in ("running", "waiting"))

    def health() -> int:
        return local_http.get(f"{server.base_url}/health").status_code

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
