"""Fields of ``/v1/images/edits`` that vLLM-Omni's endpoint drops without a word.

``mask`` is OpenAI's name for what vLLM-Omni calls ``mask_image``. ``extra_params``, JSON, is what other endpoints
take under that name: gfdit's options (:mod:`gfdit.adapters.options`) and those of pipelines.
"""

from __future__ import annotations

import functools
import json
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from gfdit.core.json_fields import shown

PATH = "/v1/images/edits"
_extra_params: ContextVar[dict[str, Any] | None] = ContextVar("extra_params of an edit", default=None)


def complete_edits(app: Any) -> None:
    """Have the endpoint of ``app`` take them. Does nothing for one without the endpoint."""
    for route in app.routes:
        if getattr(route, "path", None) == PATH:
            from vllm_omni.entrypoints.openai import api_server  # nobody without the endpoint loads all of it

            route.dependant.call = _completed(route.dependant.call)
            api_server.apply_stage_default_sampling_params = _with_extra_params(
                api_server.apply_stage_default_sampling_params
            )


def _completed(endpoint: Any) -> Any:
    @functools.wraps(endpoint)
    async def edit_images(raw_request: Any, **fields: Any) -> Any:
        form = await raw_request.form()  # which has been read already
        if (mask := form.get("mask")) is not None:
            if fields.get("mask_image") is not None:
                raise _bad("mask and mask_image are two names of one field, got both")
            fields["mask_image"] = mask
        token = _extra_params.set(_parsed(form.get("extra_params")))
        try:
            return await endpoint(raw_request=raw_request, **fields)
        finally:
            _extra_params.reset(token)

    return edit_images


def _with_extra_params(apply_defaults: Any) -> Any:
    """Called by the endpoint on the parameters that it has just made."""

    @functools.wraps(apply_defaults)
    def apply(default_params_json: Any, sampling_params: Any, stage_key: str) -> None:
        apply_defaults(default_params_json, sampling_params, stage_key)
        if (given := _extra_params.get()) is not None:
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), **given}

    return apply


def _parsed(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _bad(f"extra_params must be a JSON object, got {shown(text)}")
    return found


def _bad(text: str) -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST.value, text)
