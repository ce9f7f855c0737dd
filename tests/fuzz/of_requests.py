"""What clients send and operators set: fields of requests, settings, limits, inputs of workflows."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi.responses import JSONResponse
from hypothesis import strategies as st

from gfdit.adapters.limits import Limits
from gfdit.adapters.options import EDIT_MODES, EditOptions, RequestOptions
from gfdit.adapters.workflow_requests import WorkflowAdapter
from gfdit.core.json_fields import parse_json
from gfdit.core.layouts import ParallelSpec
from gfdit.core.policy.admission import AdmissionMode
from gfdit.core.tasks import Request, Shape, trajectory, with_min_sp
from gfdit.omni.admin import LIMITS, Admin, Step
from gfdit.omni.settings import Settings
from gfdit.runtime import messages as msg
from gfdit.workflow import Condition, Image, Workflow
from gfdit.workflow.compiling import Workflows
from gfdit.workflow.recording import Builder
from tests.fuzz.mutation import mutated_bytes, mutated_json
from tests.fuzz.strategies import ANY_JSON, dumped, fields
from tests.fuzz.targets import Target, scratch_file
from tests.workflow.models import Base as PlainBase
from tests.workflow.models import Control, Decode, Noise, Text


def _of_json(check: Callable[[Any], None], name: str) -> Callable[[bytes], None]:
    """What is no JSON is no matter of ``check``: other readers come before it."""
    return lambda data: check(parse_json(data, name))


# The field ``gfdit`` of a request's ``extra_params``


def _options(value: Any) -> None:
    """What is accepted goes on its way to the control process, as the engine sends it."""
    options = RequestOptions.parse(value)
    specs = tuple(ParallelSpec(sp) for sp in (1, 2, 4) if sp <= (options.max_sp or 4))
    graph = with_min_sp(trajectory("r", 2, specs), options.min_sp or 1)
    deadline_s = None if options.deadline_ms is None else 5.0 + options.deadline_ms / 1000
    request = Request("r", "m", Shape(64, 64), 2, 5.0, False, deadline_s, options.priority, options.slo_class)
    msg.Decoder(msg.EngineMessage).decode(msg.encode(msg.Submit(request, graph, pickle.dumps(options.inputs))))
    edit = EditOptions.parse(options.edit)
    for step in range(4):
        edit.computes_all(step, 4)
    if edit.template_prompt is not None:
        edit.template_prompt.encode()


_EDIT = fields(
    {},
    {
        "mode": st.sampled_from(EDIT_MODES),
        "refresh_every": st.none() | st.integers(1, 9),
        "full_last": st.integers(0, 9),
        "template_seed": st.integers(0, 2**63 - 1),
        "template_prompt": st.text(max_size=9),
        "steps": st.lists(st.integers(0, 50), min_size=1, max_size=5),
        "precision": st.sampled_from(("as is", "fp8")),
    },
)
_OPTIONS = fields(
    {},
    {
        "deadline_ms": st.floats(1, 1e6) | st.integers(1, 10**9),
        "slo_class": st.text(max_size=9),
        "priority": st.integers(-(2**31), 2**31),
        "min_sp": st.integers(1, 4),
        "max_sp": st.integers(1, 8),
        "workflow": st.text(max_size=9),
        "inputs": st.dictionaries(st.text(max_size=4), ANY_JSON, max_size=2),
        "edit": _EDIT,
    },
)

# What operators change


logging.getLogger("gfdit.omni.admin").setLevel(logging.ERROR)  # it tells of every change


class AdminEngine:
    """Takes every change; what the control process would be told can be sent."""

    num_ranks = 2

    def __init__(self) -> None:
        self.settings = Settings.parse({"gfdit": {"policy": "fcfs", "record": "r.jsonl"}})
        self.metrics: Any = SimpleNamespace(ranks_up=lambda: [0, 1], draining=False)

    def begin_change(self, step: Step) -> Future[None]:
        msgspec.json.decode(msgspec.json.encode(step.control))
        self.settings = step.settings
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _admin(data: bytes) -> None:
    """A new server each time: nothing is drained or changed already."""
    JSONResponse(Admin(AdminEngine(), scratch_file(""), None).change(data))


_CHANGE = fields(
    {},
    {
        "policy": st.sampled_from(("fcfs", "edf", "triage", "nope")),
        "policy_args": st.dictionaries(st.sampled_from(("group_size", "x")), ANY_JSON, max_size=1),
        "admission": st.sampled_from(("none", "deadline", "x")),
        "limits": st.dictionaries(
            st.sampled_from((*LIMITS, "ranks")), st.integers(1, 10**6) | st.none() | ANY_JSON, max_size=2
        ),
        "record": st.booleans(),
        "timeline": st.booleans(),
        "drain_ranks": st.lists(st.integers(-1, 2), max_size=2),
        "add_ranks": st.lists(st.integers(-1, 2), max_size=1),
        "drain": st.booleans(),
        "costs": st.none() | ANY_JSON,
    },
)

# Inputs of a workflow


def _workflow(value: Any) -> None:
    """As ``gfdit.inputs`` of a request for a workflow that has one input of each kind."""
    options = RequestOptions.parse({"inputs": value})
    sampling = SimpleNamespace(
        num_inference_steps=1,
        seed=None,
        height=None,
        width=None,
        guidance_scale_provided=False,
        true_cfg_scale=None,
        num_outputs_per_prompt=1,
    )
    request = SimpleNamespace(request_id="r", prompt="a", sampling_params=sampling)
    made = _adapter().convert(request, None, options)
    assert made.graph is not None
    made.graph.check()
    given = pickle.loads(made.payload or b"")
    assert given["image"].getpixel((0, 0)) is not None


@cache
def _adapter() -> WorkflowAdapter:
    with Workflow("every", 1) as every:
        sizes: dict[str, Any] = {name: every.add_input(name, int, 64) for name in ("height", "width")}
        embeds = Text("sd")(prompt=every.add_input("prompt", str))
        latents = Noise("sd")(seed=every.add_input("seed", int, 0))
        picture = Picture("sd")(
            image=every.add_input("image", Image), flag=every.add_input("flag", bool, True), **sizes
        )
        guidance = every.add_input("guidance", float, 1.0)
        latents = Base("sd")(0, latents=latents, embeds=embeds, picture=picture, guidance=guidance)
        every.add_output(Decode("sd")(latents=latents))
    adapter = WorkflowAdapter(Workflows([Builder("every", 1, lambda steps: every)]), 2)
    adapter.limits = Limits(1000, 10, 256 * 256, 256 * 256)
    return adapter


class Picture(Control):
    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("flag", bool)
        self.add_input("height", int)
        self.add_input("width", int)


class Base(PlainBase):
    def setup_io(self) -> None:
        super().setup_io()
        self.add_input("picture", Condition)


_WORKFLOW = fields(
    {"image": st.sampled_from(("aGk=", "data:image/png;base64,aGk="))},
    {
        "prompt": st.text(max_size=9),
        "seed": st.integers(),
        "height": st.integers(-5, 400),
        "width": st.integers(-5, 400),
        "guidance": st.integers() | st.floats(),
        "flag": st.booleans(),
    },
)


def _changed_picture(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Every other time only the file that is in the base64, which a change of JSON would hardly get to."""
    try:
        value = json.loads(draw.choice(seeds))
    except ValueError:
        value = None
    if draw.random() < 0.5 or not isinstance(value, dict) or not isinstance(value.get("image"), str):
        return mutated_json(draw, seeds)
    picture = base64.b64decode(value["image"])
    return dumped(value | {"image": base64.b64encode(mutated_bytes(draw, [picture])).decode()})


# Sampling parameters, of endpoints that do not check types


_SAMPLED = (
    *("height", "width", "num_frames", "num_inference_steps", "num_outputs_per_prompt"),
    *("seed", "guidance_scale", "true_cfg_scale", "strength", "resolution"),
)


def _limits(value: Any) -> None:
    given = value if isinstance(value, dict) else {"height": value}
    Limits(1000, 10, 4096 * 4096, 1280 * 720 * 161).check_fields(
        SimpleNamespace(**{name: given.get(name) for name in _SAMPLED})
    )


_SAMPLING = st.fixed_dictionaries({name: st.none() | st.integers() | ANY_JSON for name in _SAMPLED})

# Settings of a server


def _settings(value: Any) -> None:
    settings = Settings.parse({"gfdit": value})
    _ = settings.device_names, settings.limits, settings.name_of("some/model")


_SETTINGS = fields(
    {},
    {
        "policy": st.sampled_from(("triage", "fcfs", "static", "edf")),
        "policy_args": st.dictionaries(st.sampled_from(("group_size", "patience", "x")), ANY_JSON, max_size=1),
        "admission": st.sampled_from(AdmissionMode.__args__),  # type: ignore[attr-defined]
        "ranks": st.integers(1, 8),
        "devices": st.text(max_size=8),
        "ring": st.booleans(),
        "max_pixels": st.integers(1, 2**40),
        "start_timeout_s": st.floats(1, 1e6),
        "max_queue_s": st.none() | st.floats(1, 1e6),
        "workflows": st.lists(st.text(max_size=4), max_size=2),
        "run_ahead": st.sampled_from((0, 1)),
        "edit": _EDIT,
    },
)

TARGETS: tuple[Target, ...] = (
    Target(
        "the request's field",
        _of_json(_options, "gfdit"),
        mutated_json,
        lambda: _OPTIONS.map(dumped),
        ("gfdit", "min_sp"),
        weight=6,
    ),
    Target("changes by operators", _admin, mutated_json, lambda: _CHANGE.map(dumped), weight=2),
    Target(
        "inputs of workflows",
        _of_json(_workflow, "inputs"),
        _changed_picture,
        lambda: _WORKFLOW.map(dumped),
        ("input", "gfdit.inputs", "height", "size"),
    ),
    Target(
        "sampling parameters", _of_json(_limits, "json"), mutated_json, lambda: _SAMPLING.map(dumped), weight=2
    ),
    Target(
        "settings",
        _of_json(_settings, "gfdit"),
        mutated_json,
        lambda: _SETTINGS.map(dumped),
        ("gfdit", "polic", "admission"),
    ),
)
