"""What one request may ask for, and all of them together: beyond it is an HTTP 4xx before any work is done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm_omni.errors import OmniClientError

from gfdit.adapters.options import RequestOptions
from gfdit.core import commands as cmd
from gfdit.core.events import RequestCancelled
from gfdit.omni.plugin import find_accelerator
from gfdit.runtime import messages as msg
from tests.support.lone_engine import image_request, lone_engine

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_inference_steps": 101}, "num_inference_steps: 101 steps in all, at most 100 are allowed"),
        ({"sigmas": [1.0] * 101}, "num_inference_steps: 101 steps in all, at most 100 are allowed"),
        ({"num_inference_steps": 10**400}, "num_inference_steps: 10"),
        ({"num_outputs_per_prompt": 5}, r"num_outputs_per_prompt \(n\) must be at most 4, got 5"),
        ({"height": 512, "width": 513}, "size 512x513 has 262656 pixels a frame, at most 262144 are allowed"),
        (
            {"height": 512, "width": 512, "num_outputs_per_prompt": 2},
            r"num_outputs_per_prompt \(n\): 2 of 512x512 have 524288 pixels, at most 262144 are allowed",
        ),
        ({"height": 64, "width": 64, "num_frames": 245}, "num_frames: 1 of 64x64x245 have 1003520 pixels"),
        (
            {"height": 64, "width": 64, "num_frames": 100, "num_outputs_per_prompt": 3},
            "num_frames: 3 of 64x64x100 have 1228800 pixels, at most 1000000 are allowed",
        ),
        # Not every endpoint of vLLM-Omni checks the types of its JSON.
        ({"num_inference_steps": "20"}, "num_inference_steps must be a positive integer, got '20'"),
        ({"num_outputs_per_prompt": 1.5}, "num_outputs_per_prompt must be a positive integer, got 1.5"),
        ({"num_frames": [1]}, r"num_frames must be a positive integer, got \[1\]"),
        ({"height": -64, "width": -64}, "height must be a positive integer, got -64"),
        ({"height": np.int64(64)}, "height must be a positive integer"),  # no message carries it
        ({"width": True}, "width must be a positive integer, got True"),
    ],
)
def test_what_a_request_may_not_ask_for(asked: dict[str, Any], message: str) -> None:
    limits = {"max_steps": 100, "max_outputs": 4, "max_pixels": 512 * 512, "max_video_pixels": 1_000_000}
    with lone_engine(**limits) as engine:
        defaults = {} if "height" in asked else {"height": 256, "width": 256}
        with pytest.raises(OmniClientError, match=message) as refused:
            engine.add_request(image_request(**(defaults | asked)))
        assert refused.value.status_code == 400 and len(str(refused.value)) < 1000


def test_what_a_request_may_ask_for() -> None:
    limits = {"max_steps": 100, "max_outputs": 4, "max_pixels": 512 * 512, "max_video_pixels": 1_000_000}
    with lone_engine(**limits) as engine:
        sides: dict[str, Any] = {"height": 256, "width": 256}
        engine.add_request(image_request("r1", num_inference_steps=100, num_outputs_per_prompt=4, **sides))
        engine.add_request(image_request("r2", height=64, width=64, num_frames=81, num_outputs_per_prompt=3))
        assert len(engine.executor.client.sent(msg.Submit).graph.tasks) == 1 + 100 + 1


def test_steps_are_refused_before_they_are_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 of them would keep every client of the server waiting."""
    monkeypatch.setattr("gfdit.adapters.engine_half.trajectory", lambda *_, **__: pytest.fail("a graph is made"))
    with lone_engine() as engine, pytest.raises(OmniClientError, match="at most 1000 are allowed"):
        engine.add_request(image_request(height=64, width=64, sigmas=[1.0] * 1001))


def test_sizes_are_refused_before_images_are_scaled_to_them() -> None:
    with lone_engine() as engine:
        engine.pre_process_func = lambda _: pytest.fail("images are scaled")
        with pytest.raises(OmniClientError, match="at most 16777216 are allowed"):
            engine.add_request(image_request(height=100_000, width=100_000))


def with_image(request_id: str, side: int) -> Any:
    request = image_request(request_id, height=64, width=64, num_inference_steps=2)
    request.prompt = {"prompt": "a red panda", "multi_modal_data": {"image": Image.new("RGB", (side, side))}}
    return request


def test_more_input_than_a_request_may_have() -> None:
    with lone_engine(max_payload_bytes=100_000) as engine:
        engine.add_request(with_image("r1", 150))
        with pytest.raises(OmniClientError, match="at most 100000 are allowed") as refused:
            engine.add_request(with_image("r2", 200))
        assert refused.value.status_code == 413
        assert "prompt and input images take 12" in str(refused.value)


def test_more_input_than_all_requests_may_have() -> None:
    with lone_engine(max_queued_bytes=300_000) as engine:
        client = engine.executor.client
        for number in range(2):
            engine.add_request(with_image(f"r{number}", 200))
            client.sent(msg.Submit)
        with pytest.raises(OmniClientError, match=r"take 300000 bytes already \(retry after 1 s") as refused:
            engine.add_request(with_image("r2", 200))
        assert refused.value.status_code == 429
        for request_id, outcome in (("r0", "failed"), ("r1", "cancelled")):
            if outcome == "cancelled":
                engine.abort(request_id)
                client.sent(RequestCancelled)
            cancelled = outcome == "cancelled"
            client.tell(cmd.CancelRequest(request_id) if cancelled else cmd.FailRequest(request_id, "a reason"))
        engine.collective_rpc("gfdit_describe")  # once the loop has taken that in
        assert engine.scheduler.payload_bytes == 0
        engine.add_request(with_image("r2", 200))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priority": 10**30}, "gfdit.priority must be an integer from -2147483648 to 2147483648, got 10"),
        ({"deadline_ms": 10**400}, r"gfdit.deadline_ms must be a positive number of milliseconds up to 1e\+12"),
        ({"deadline_ms": float("nan")}, "gfdit.deadline_ms must be a positive number"),
        ({"slo_class": "x" * 1001}, "gfdit.slo_class must be a string of at most 1000 characters, got 'xxx"),
        ({"slo_class": "\ud800"}, "gfdit.slo_class must be a string of at most 1000 characters"),
    ],
)
def test_options_that_no_message_can_carry(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        RequestOptions.parse(given)
    assert len(str(refused.value)) < 300
