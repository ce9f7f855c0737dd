"""Requests of workflows in the engine: which one, with what inputs, as a task graph."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import PIL.Image

from gfdit.adapters.base import Trajectory
from gfdit.adapters.limits import Limits
from gfdit.adapters.options import RequestOptions
from gfdit.core.json_fields import one_line, shown
from gfdit.core.tasks import Shape
from gfdit.workflow.compiling import CompiledWorkflow, Workflows, load_workflows
from gfdit.workflow.model import Image

_DEFAULT_SIDE = 1024


class WorkflowAdapter:
    """In the place of a :class:`~gfdit.adapters.base.ModelAdapter` of one pipeline; engine half only.

    A workflow's inputs are filled by name: what the API has fields for from these, everything else, and these too,
    from ``gfdit.inputs`` of the request.
    """

    sequence_plan = None
    ring = False
    limits: Limits | None = None

    def __init__(self, workflows: Workflows, num_ranks: int) -> None:
        self.workflows = workflows
        self.num_ranks = num_ranks

    @classmethod
    def load(cls, paths: list[str], num_ranks: int) -> WorkflowAdapter:
        """Raises ``ValueError`` of one line for a file that is wrong."""
        return cls(load_workflows(paths), num_ranks)

    @property
    def checkpoint(self) -> str:
        """Of the first base model: the folder that stands for the server's model."""
        for compiled in map(self.workflows.get, self.workflows.names):
            for model in compiled.models:
                if model.kind == "denoise":
                    return model.source
        raise ValueError("no workflow has a denoising model")

    def convert(self, request: Any, max_sp: int | None, options: RequestOptions) -> Trajectory:
        """Raises ``ValueError`` naming what is unknown, missing or wrong."""
        sampling = request.sampling_params
        name = options.workflow or self.workflows.names[0]
        steps = sampling.num_inference_steps or None
        compiled = self.workflows.get(name, steps)
        values = compiled.given(self._values(request, compiled, options))
        shape = Shape(int(values.get("height") or _DEFAULT_SIDE), int(values.get("width") or _DEFAULT_SIDE))
        if min(shape.height, shape.width) < 1:
            raise ValueError(f"height and width must be positive, got {shape.height} and {shape.width}")
        if self.limits is not None:
            self.limits.check(shape, compiled.num_steps, sampling)
        num_ranks = self.num_ranks if max_sp is None else min(max_sp, self.num_ranks)
        guided = compiled.guided(values)
        graph, after_miss = compiled.graph(request.request_id, num_ranks, guided), None
        if compiled.has_cache:
            cached = self.workflows.get(name, steps, cached=True)
            graph, after_miss = cached.graph(request.request_id, num_ranks, guided), graph
        payload = pickle.dumps(values)
        return Trajectory(shape, compiled.num_steps, guided, graph, compiled.name, payload, after_miss)

    def _values(self, request: Any, compiled: CompiledWorkflow, options: RequestOptions) -> dict[str, Any]:
        sampling, text = request.sampling_params, request.prompt
        known = compiled.workflow.inputs
        of_api = {
            "prompt": text if isinstance(text, str) else text.get("prompt") or "",
            "negative_prompt": None if isinstance(text, str) else text.get("negative_prompt"),
            "seed": sampling.seed,
            "height": sampling.height,
            "width": sampling.width,
            "guidance_scale": sampling.guidance_scale if sampling.guidance_scale_provided else None,
            "true_cfg_scale": sampling.true_cfg_scale,
        }
        values = {name: value for name, value in of_api.items() if name in known and value is not None}
        for name, value in (options.inputs or {}).items():
            one = known.get(name)
            values[name] = _image(name, value, self.limits) if one is not None and one.type is Image else value
        return values


def _image(name: str, value: Any, limits: Limits | None) -> PIL.Image.Image:
    if not isinstance(value, str):
        raise ValueError(f"input {name!r} must be an image as base64, got {shown(value)}")
    try:
        data = base64.b64decode(value.partition("base64,")[2] or value, validate=True)
        image = PIL.Image.open(io.BytesIO(data))
        if limits is None or image.width * image.height <= limits.max_pixels:
            image.load()
            return image
    except Exception as error:  # decoders raise whatever comes of the bytes they are given
        raise ValueError(f"input {name!r} is no image: {one_line(error)}") from error
    raise ValueError(f"input {name!r} has {image.width} x {image.height} pixels, more than {limits.max_pixels}")
