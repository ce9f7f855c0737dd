"""A client's view of videos: `gfdit serve` on a small Wan2.2, from text and from an image."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gfdit.cli.main import main
from gfdit.observe.timeline import Span, read_timeline
from tests.support import local_http
from tests.support.openai_client import openai_client
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.videos import frames_of, get, post_video, wait_for_job
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough

NUM_FRAMES, HEIGHT, WIDTH = 9, 64, 96
FIELDS = {
    "prompt": "a red panda",
    "size": f"{WIDTH}x{HEIGHT}",
    "num_frames": NUM_FRAMES,
    "num_inference_steps": 4,
    "seed": 1,
}


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("video") / "timeline.json"


@pytest.fixture(scope="module")
def server(timeline: Path) -> Iterator[ServerProcess]:
    model = timeline.with_name("wan2.2-ti2v")
    assert main(["tiny-model", "wan2.2-ti2v", str(model)]) == 0
    argv = ["gfdit", "serve", str(model), "--ranks", "2", "--policy", "equipartition"]
    argv += ["--timeline", str(timeline), "--", "--enforce-eager", "--dtype", "float32"]
    with start_server(argv, free_port(), timeline.with_name("log")) as server:
        yield server


def sync(server: ServerProcess, image: Image.Image | None = None, **fields: Any) -> httpx.Response:
    return post_video(server.base_url, "/v1/videos/sync", {**FIELDS, **fields}, image)


def frames(server: ServerProcess, image: Image.Image | None = None, **fields: Any) -> np.ndarray:
    response = sync(server, image, **fields)
    assert response.status_code == 200, response.text
    return frames_of(response.content)


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((WIDTH, HEIGHT))


def test_a_video_at_once(server: ServerProcess) -> None:
    options = {"gfdit": {"deadline_ms": 60_000, "slo_class": "interactive", "priority": 5}}
    video = frames(server, extra_params=options)
    assert video.shape == (NUM_FRAMES, HEIGHT, WIDTH, 3)
    assert video.std() > 1
    assert np.array_equal(frames(server), video)
    assert not np.array_equal(frames(server, seed=2), video)


def test_a_video_as_a_job(server: ServerProcess) -> None:
    job = post_video(server.base_url, "/v1/videos", {**FIELDS, "num_inference_steps": 40}).json()
    assert job["status"] == "queued" and job["progress"] == 0
    said = wait_for_job(server.base_url, job["id"])
    assert [entry["status"] for entry in said][-2:] == ["in_progress", "completed"]
    assert said[-1]["progress"] == 100 and said[-1]["num_frames"] == NUM_FRAMES
    content = get(server.base_url, f"/v1/videos/{job['id']}/content").content
    assert np.array_equal(frames_of(content), frames(server, num_inference_steps=40))
    deleted = local_http.delete(f"{server.base_url}/v1/videos/{job['id']}")
    assert deleted.json()["deleted"] is True


def test_the_openai_client(server: ServerProcess) -> None:
    fields = {name: str(FIELDS[name]) for name in ("size", "num_frames", "num_inference_steps", "seed")}
    with openai_client(server) as client, warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        job = client.videos.create_and_poll(prompt=str(FIELDS["prompt"]), extra_body=fields, poll_interval_ms=200)
        assert job.status == "completed" and job.error is None
        content = client.videos.download_content(job.id).content
        assert np.array_equal(frames_of(content), frames(server))
        assert client.videos.delete(job.id).deleted


def test_a_video_of_an_image(server: ServerProcess, timeline: Path) -> None:
    video = frames(server, picture(1))
    assert video.shape == (NUM_FRAMES, HEIGHT, WIDTH, 3)
    assert np.array_equal(frames(server, picture(1)), video)
    others = [frames(server, picture(2)), frames(server)]
    assert not any(np.array_equal(other, video) for other in others)

    def num_encode_tasks() -> set[int]:
        return set(Counter(span.request for span in read_timeline(timeline) if span.kind == "encode").values())

    wait_until(lambda: num_encode_tasks() == {1, 2}, "the image has an encode task of its own")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_params": {"sample_solver": "dpm"}}, "sample_solver='dpm'"),
        ({"extra_params": {"flow_shift": "fast"}}, "flow_shift='fast'"),
        ({"flow_shift": -1.0}, "flow_shift must be a positive number"),
        ({"size": "96x16"}, "height must be between 32 and 32768 pixels, got 16"),
        ({"num_frames": 5000}, "num_frames must be between 1 and 4093, got 5000"),
        ({"size": "1280x704", "num_frames": 201}, "num_frames: 704x1280x201 has 181125120 pixels, at most"),
        ({"extra_params": {"gfdit": {"priority": 1.5}}}, "gfdit.priority must be an integer"),
    ],
)
def test_what_is_wrong_is_named(server: ServerProcess, fields: dict[str, Any], message: str) -> None:
    response = sync(server, **fields)
    assert response.status_code == 400 and message in json.dumps(response.json())
    job = post_video(server.base_url, "/v1/videos", {**FIELDS, **fields}).json()
    failed = wait_for_job(server.base_url, job["id"])[-1]
    assert failed["status"] == "failed" and message in json.dumps(failed["error"])


def test_a_job_that_is_deleted_frees_its_ranks(server: ServerProcess, timeline: Path) -> None:
    """Seen in the timeline, where it is the only one with so many steps."""

    def far_spans() -> list[Span]:
        return [span for span in read_timeline(timeline) if span.step > 40]

    long = {**FIELDS, "size": "256x256", "num_frames": 33, "num_inference_steps": 200}
    job = f"{server.base_url}/v1/videos/{post_video(server.base_url, '/v1/videos', long).json()['id']}"
    wait_until(far_spans, "the job runs")
    assert local_http.delete(job).status_code == 200
    assert frames(server).shape[0] == NUM_FRAMES
    deleted = far_spans()[-1].request
    wait_until(lambda: read_timeline(timeline)[-1].request != deleted, "the timeline has what came after it")
    of_it = [span for span in read_timeline(timeline) if span.request == deleted]
    assert "decode" not in {span.kind for span in of_it} and max(span.step for span in of_it) < 199
    assert local_http.get(job).status_code == 404
