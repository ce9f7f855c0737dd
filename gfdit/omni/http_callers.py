"""From a client's HTTP headers to the engine's request: X-Request-Id and the trace that the request belongs to.

vLLM-Omni gives every request a name of its own and hands on none of the two. That name is made in the task of the
HTTP request (``_get_unique_request_id`` of its client), so it is there that both are known. What it makes gets the
client's own id in the middle: so every line of a log, in every process, and every span, names both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from gfdit.observe.metrics import SHOWN
from gfdit.observe.tracing import Caller

MAX_ID_LENGTH = 64
MAX_STATE_LENGTH = 512  # what the standard asks to be handed on; it is in every span
_HEADERS = (b"x-request-id", b"traceparent", b"tracestate")
_UNUSUAL = re.compile(r"[^\w.:-]", re.ASCII)
_caller: ContextVar[Caller] = ContextVar("headers of the client", default=Caller())  # noqa: B039 (immutable)


def note_caller(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """For the rest of this task: these are the headers of its client."""
    found: dict[bytes, list[str]] = {name: [] for name in _HEADERS}
    for name, value in headers:
        if (lower := name.lower()) in found:
            found[lower].append(value.decode("latin-1"))
    request_id, traceparent, tracestate = found.values()
    _caller.set(
        Caller(
            _UNUSUAL.sub("_", request_id[0].strip())[:MAX_ID_LENGTH] if request_id else "",
            traceparent[0] if len(traceparent) == 1 else "",
            state if len(state := ",".join(tracestate)) <= MAX_STATE_LENGTH else "",
        )
    )


def carry_callers(client: Any) -> None:
    """Have the names of ``client``'s requests tell whose they are. Nothing for one that names none."""
    client = getattr(client, "_wrapped", client)  # a shim for vLLM's launcher, which only forwards
    make_id = getattr(client, "_get_unique_request_id", None)
    if make_id is None:
        return

    def unique_request_id(external_request_id: str) -> str:
        caller = _caller.get()
        if caller.request_id and caller.request_id not in external_request_id:
            external_request_id = "-".join(filter(None, (external_request_id, caller.request_id)))
        request_id: str = make_id(external_request_id)
        if SHOWN.server is not None and SHOWN.server.tracing is not None:
            SHOWN.server.tracing.expect(request_id, caller)
        return request_id

    client._get_unique_request_id = unique_request_id
