"""What no request may hold, whatever its endpoint: it would not get as far as the engine, which refuses all else.

vLLM-Omni 0.30 copies a request on its way (``copy.deepcopy``). Where JSON is nested deeper than that can go, its
orchestrator ends, and all requests with it. Halves of surrogate pairs, which JSON can escape, cannot be sent, nor
said in an answer.
"""

from __future__ import annotations

import functools
from typing import Any

from gfdit.core.json_fields import check_plain


def check_inputs(client: Any) -> None:
    """Have ``generate`` of vLLM-Omni's ``client``, which all endpoints call, refuse such requests: HTTP 400."""
    client = getattr(client, "_wrapped", client)  # a shim for vLLM's launcher, which only forwards
    client.generate = _checked(client.generate)


def _checked(generate: Any) -> Any:
    @functools.wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            for prompt in [*args[:1], kwargs.get("prompt")]:
                _check_fields(prompt if isinstance(prompt, dict) else {"prompt": prompt})
            for sampling in kwargs.get("sampling_params_list") or ():
                _check_fields({"extra_params": getattr(sampling, "extra_args", None)})
        except ValueError as error:
            from vllm_omni.errors import OmniClientError  # who only has the front loads nothing of it

            raise OmniClientError(str(error)) from error
        return generate(*args, **kwargs)

    return checked


def _check_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        check_plain(value, name)
