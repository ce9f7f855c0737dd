"""A client's view of editing and of videos in chunks: `gfdit serve` on small checkpoints over HTTP."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gfdit.cli.main import main
from gfdit.cli.replay import ReplayOptions, replay
from gfdit.observe.timeline import read_timeline
from gfdit.omni.plugin import find_accelerator
from gfdit.sim.trace import TraceRequest
from tests.support import local_http
from tests.support.openai_client import only_image, openai_client
from tests.support.server import ServerProcess, free_port, start_server
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform"),
]

SIZE = (128, 96)  # width, height
FLOAT32_BYTES = 4
FORM = {
    "prompt": "make it blue",
    "negative_prompt": " ",
    "size": f"{SIZE[0]}x{SIZE[1]}",
    "num_inference_steps": "3",
    "true_cfg_scale": "4",
    "seed": "1",
}
CHAT_FIELDS: dict[str, Any] = {
    "width": SIZE[0],
    "height": SIZE[1],
    "num_inference_steps": 3,
    "seed": 1,
    "true_cfg_scale": 4.0,
    "negative_prompt": " ",
}


def png(seed: int = 1, width: int = 80, height: int = 60) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(buffer, format="PNG")
    return buffer.getvalue()


def serve(family: str, folder: Path, *flags: str) -> Any:
    model = folder / family
    assert main(["tiny-model", family, str(model)]) == 0
    argv = ["gfdit", "serve", str(model), "--ranks", "2", *flags, "--timeline", str(folder / "timeline.json")]
    argv += ["--", "--enforce-eager", "--dtype", "float32"]
    return start_server(argv, free_port(), folder / "log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edit")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serve("qwen-image-edit", folder) as server:
        yield server


def post(server: ServerProcess, path: str, **arguments: Any) -> httpx.Response:
    return local_http.post(f"{server.base_url}{path}", **arguments)


def edit(server: ServerProcess, image: bytes | None = None, **fields: str) -> httpx.Response:
    files = {"image": ("image.png", image, "image/png")} if image is not None else None
    return post(server, "/v1/images/edits", data={**FORM, **fields}, files=files)


def chat_messages(image: bytes | None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": FORM["prompt"]}]
    if image is not None:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]


def chat(server: ServerProcess, image: bytes | None = None, **fields: Any) -> httpx.Response:
    body = {"messages": chat_messages(image), "extra_body": CHAT_FIELDS | fields}
    return post(server, "/v1/chat/completions", json=body)


def edited(response: httpx.Response) -> Image.Image:
    assert response.status_code == 200, response.text
    return Image.open(io.BytesIO(base64.b64decode(response.json()["data"][0]["b64_json"])))


def drawn(response: httpx.Response) -> Image.Image:
    assert response.status_code == 200, response.text
    return picture_of(response.json())


def picture_of(completion: dict[str, Any]) -> Image.Image:
    url = completion["choices"][0]["message"]["content"][0]["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2])))


def test_an_edit(server: ServerProcess) -> None:
    image = edited(edit(server, png()))
    assert image.size == SIZE
    assert edited(edit(server, png())).tobytes() == image.tobytes()
    assert edited(edit(server, png(2))).tobytes() != image.tobytes(), "the input image matters"
    assert edited(edit(server, png(), seed="2")).tobytes() != image.tobytes()


def test_a_chat_with_an_image_is_the_same_edit_and_takes_options(server: ServerProcess) -> None:
    options = {"gfdit": {"deadline_ms": 60_000, "slo_class": "interactive", "priority": 5, "max_sp": 1}}
    image = drawn(chat(server, png(), extra_args=options))
    assert image.tobytes() == edited(edit(server, png())).tobytes()
    refused = chat(server, png(), extra_args={"gfdit": {"deadline_ms": -1}})
    assert refused.status_code == 400 and "gfdit.deadline_ms must be" in refused.text


def test_the_openai_client(server: ServerProcess) -> None:
    image = edited(edit(server, png()))
    fields = {name: FORM[name] for name in ("negative_prompt", "num_inference_steps", "true_cfg_scale", "seed")}
    with openai_client(server) as client:
        # 128x96 is none of the sizes that its types know.
        made = client.images.edit(
            image=("image.png", png()), prompt=FORM["prompt"], extra_body={**fields, "size": FORM["size"]}
        )
        assert only_image(made).tobytes() == image.tobytes()
        said = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=chat_messages(png()),  # type: ignore[arg-type]
            extra_body=CHAT_FIELDS,
        )
    assert said.choices[0].finish_reason == "stop"
    assert picture_of(said.to_dict(warnings=False)).tobytes() == image.tobytes()


def test_the_size_is_that_of_the_input_image_if_none_is_given(server: ServerProcess) -> None:
    assert edited(edit(server, png(width=160, height=128), size="auto")).size == (160, 128)


def test_without_an_image(server: ServerProcess) -> None:
    for response in (
        chat(server),
        post(server, "/v1/images/generations", json={"prompt": "a red panda", "size": "128x128"}),
    ):
        assert response.status_code == 400, response.text
        assert "requires one input image" in json.dumps(response.json())
    assert edit(server).status_code == 422, "vLLM-Omni's own check of the form"
    assert edited(edit(server, png())).size == SIZE


@pytest.mark.parametrize(
    ("image", "fields"),
    [(b"not a picture", {}), (png()[:60], {}), (png(), {"size": "wide"}), (png(), {"size": "140000x16"})],
    ids=["not a picture", "cut off", "size", "too large"],
)
def test_bad_input_is_the_clients_mistake(server: ServerProcess, image: bytes, fields: dict[str, str]) -> None:
    response = edit(server, image, **fields)
    assert 400 <= response.status_code < 500, response.text
    assert edited(edit(server, png())).size == SIZE


def test_a_trace_with_an_input_image(server: ServerProcess) -> None:
    trace = [TraceRequest(f"r{i}", 0.1 * i, "", SIZE[1], SIZE[0], 1, 2, cfg=bool(i % 2)) for i in range(3)]
    outcomes = replay(trace, ReplayOptions(server.base_url, send_slo=True, input_image=png()))
    assert [outcome.error for outcome in outcomes] == [""] * 3


def test_healthy_after_all_that(server: ServerProcess) -> None:
    assert local_http.get(f"{server.base_url}/health").status_code == 200


def test_an_edit_of_several_images(tmp_path: Path) -> None:
    with serve("qwen-image-edit-plus", tmp_path) as server:
        one, two = (pictures(server, *seeds) for seeds in ((1,), (1, 2)))
        assert one.size == two.size == SIZE
        assert pictures(server, 1, 2).tobytes() == two.tobytes()
        assert pictures(server, 1, 3).tobytes() != two.tobytes(), "the second input image matters"
        assert one.tobytes() != two.tobytes()
        refused = chat(server)
        assert refused.status_code == 400 and "image is missing" in refused.text
        assert pictures(server, 1).tobytes() == one.tobytes()


def pictures(server: ServerProcess, *seeds: int) -> Image.Image:
    """What the server makes of one input image per seed."""
    files = [("image", (f"{seed}.png", png(seed), "image/png")) for seed in seeds]
    return edited(post(server, "/v1/images/edits", data=FORM, files=files))


def test_videos_in_chunks(tmp_path: Path) -> None:
    with serve("helios", tmp_path, "--policy", "equipartition") as server:
        form = {
            "prompt": "a red panda",
            "size": "64x64",
            "num_frames": "40",
            "fps": "16",
            "num_inference_steps": "3",
            "seed": "1",
        }
        fields = {name: (None, value) for name, value in form.items()}
        made = post(server, "/v1/videos/sync", files=fields)
        assert made.status_code == 200 and made.headers["content-type"].startswith("video/mp4"), made.text[:500]
        assert post(server, "/v1/videos/sync", files=fields).content == made.content
        bad = {**fields, "extra_params": (None, json.dumps({"history_sizes": [16]}))}
        refused = post(server, "/v1/videos/sync", files=bad)
        assert refused.status_code == 400 and "history_sizes must be [16, 2, 1]" in refused.text

        def steps() -> set[int]:
            spans = read_timeline(tmp_path / "timeline.json")
            return {span.step for span in spans if span.kind == "denoise"}

        wait_until(lambda: steps() == set(range(2 * 3)), "the timeline has the steps of both chunks")


def test_profile(tmp_path: Path) -> None:
    """What is carried between tasks has the picture in it: 1024 x 1024 pixels, whatever its size was."""
    from gfdit.core.cost.table import CostTable

    model, picture, out = tmp_path / "qwen-image-edit", tmp_path / "input.png", tmp_path / "c.json"
    assert main(["tiny-model", "qwen-image-edit", str(model)]) == 0
    picture.write_bytes(png())
    argv = ["profile", str(model), "--ranks", "2", "--out", str(out), "--shape", "64x64", "--cfg", "off"]
    argv += ["--input-image", str(picture), "--spread", "0.9", "--min-reps", "2", "--max-reps", "4"]
    assert main([*argv, "--", "--dtype", "float32", "--enforce-eager"]) == 0
    table = CostTable.load(out)
    assert {str(entry.task) for entry in table.entries} == {"encode", "denoise", "decode"}
    sizes = {size.artifact: size.num_bytes for size in table.artifacts}
    assert sizes.keys() == {"conditioning", "latents"} and sizes["conditioning"] > 3 * 1024 * 1024 * FLOAT32_BYTES
