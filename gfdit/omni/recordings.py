"""Templates are recorded by requests of the engine's own, behind those of clients (FlashPS §4.2, lazily).

An edit that lacks what it would read computes all tokens, and has the rest recorded for the next one, as one
request for each rank: steps of a template do not depend on each other.
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from typing import Any

from vllm.logger import init_logger
from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.adapters.forward.adapter import ForwardAdapter
from gfdit.adapters.forward.inpainting import edit_options_of
from gfdit.adapters.forward.templates import template_of
from gfdit.templates.budget import Precision, plan_budget
from gfdit.templates.keys import TemplateKey
from gfdit.templates.store import TemplateStore

logger = init_logger(__name__)

#: At once; further edits find less.
MAX_RECORDINGS = 32
#: After which a template of which something is missing is recorded again: there may have been no room for it.
RETRY_AFTER_S = 60.0
_MAX_REMEMBERED = 10_000


class Recordings:
    """Those that are under way."""

    def __init__(
        self, store: TemplateStore, adapter: ForwardAdapter, num_ranks: int, template_bytes: int | None
    ) -> None:
        self.store = store
        self._template_bytes = template_bytes
        self._adapter = adapter
        self._num_ranks = num_ranks
        self._templates: dict[str, TemplateKey] = {}  # by request id
        self._recorded_s: OrderedDict[TemplateKey, float] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._templates

    def begin(self, edit: OmniDiffusionRequest, priority: int) -> list[OmniDiffusionRequest]:
        """Requests that record what ``edit`` will not find; what is on disk is loaded meanwhile."""
        if edit_options_of(edit).mode != "cached":
            return []
        template = template_of(edit, self._adapter.od_config)
        self.store.warm(template)
        recorded_s = self._recorded_s.get(template, -math.inf)
        is_recorded = template in self._templates.values() or time.monotonic() < recorded_s + RETRY_AFTER_S
        if is_recorded or len(self._templates) >= MAX_RECORDINGS:
            return []
        kept = self._kept(edit)
        missing = [step for step in self.missing(edit) if step in kept]
        shares = [share for rank in range(self._num_ranks) if (share := missing[rank :: self._num_ranks])]
        requests = [
            _recording(edit, number, share, kept[share[0]], priority - 1) for number, share in enumerate(shares)
        ]
        self._templates.update((request.request_id, template) for request in requests)
        if requests:
            logger.info("recording %d steps of template %.12s", len(missing), template)
        return requests

    def missing(self, edit: OmniDiffusionRequest) -> list[int]:
        """Steps of its template that ``edit`` would read, and that are not recorded."""
        if edit_options_of(edit).mode != "cached":
            return []
        steps, num_branches = self._adapter.template_steps(edit), 1 + self._adapter.uses_cfg(edit)
        template = template_of(edit, self._adapter.od_config)
        passes = self.store.missing(template, steps, num_branches, range(self._adapter.num_heads))
        return sorted({step for step, _ in passes})

    def _kept(self, edit: OmniDiffusionRequest) -> dict[int, Precision]:
        """How each step is kept; others are computed in full."""
        num_steps = max(self._adapter.template_steps(edit), default=-1) + 1
        if self._template_bytes is None or not num_steps:
            return dict.fromkeys(range(num_steps), "as is")
        size_of, value_bytes = self._adapter.template_bytes_of_step, self._adapter.od_config.dtype.itemsize
        return plan_budget(num_steps, size_of(edit, value_bytes), size_of(edit, 1), self._template_bytes)

    def end(self, request_id: str, error: str | None) -> None:
        template = self._templates.pop(request_id)
        self._recorded_s[template] = time.monotonic()
        if len(self._recorded_s) > _MAX_REMEMBERED:
            self._recorded_s.popitem(last=False)
        if error is not None:
            logger.warning("template %.12s was not recorded to its end: %s", template, error)


def _recording(
    edit: OmniDiffusionRequest, number: int, steps: list[int], precision: Precision, priority: int
) -> OmniDiffusionRequest:
    options = edit_options_of(edit)
    made = copy.copy(edit)
    made.request_id = f"{edit.request_id}-template-{number}"
    made.prompt = dict(edit.prompt)
    if options.template_prompt is not None:
        made.prompt["prompt"] = options.template_prompt
    made.sampling_params = sampling = copy.copy(edit.sampling_params)
    sampling.seed, sampling.generator, sampling.num_outputs_per_prompt = options.template_seed, None, 1
    asked: dict[str, Any] = {"mode": "record", "template_seed": options.template_seed, "steps": steps}
    asked["precision"] = precision
    sampling.extra_args = {**sampling.extra_args, "gfdit": {"edit": asked, "priority": priority}}
    return made
