"""HTTP requests as inputs: a line with method, path and content type, then the body; and changes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from tests.fuzz.mutation import mutated_bytes, mutated_json

BOUNDARY = "0123456789abcdef"
_TYPES = (
    *("application/json", f"multipart/form-data; boundary={BOUNDARY}", "multipart/form-data", "text/plain", ""),
    *(
        "application/x-www-form-urlencoded",
        "application/json; charset=utf-16",
        "multipart/form-data; boundary=\xff",
    ),
)
_METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS")


class HttpRequest(NamedTuple):
    method: str
    path: str
    content_type: str
    body: bytes

    @classmethod
    def parse(cls, data: bytes) -> HttpRequest:
        """Of what is broken as much as can be sent."""
        head, _, body = data.partition(b"\n")
        method, path, content_type, *_ = [*head.decode("latin-1").split(" ", 2), "", ""]
        return cls(method if method in _METHODS else "POST", _sendable(path), content_type.strip(), body)

    def packed(self) -> bytes:
        return f"{self.method} {self.path} {self.content_type}\n".encode("latin-1") + self.body


def _sendable(path: str) -> str:
    kept = "".join(one for one in path if one.isascii() and one.isprintable() and one not in " #")
    return f"/{kept.lstrip('/')}"  # with two it would name a host


def mutated_requests(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Mostly the body; JSON as JSON, and forms also in the JSON that a field of theirs may hold."""
    request = HttpRequest.parse(draw.choice(seeds))
    if draw.random() < 0.03:
        request = request._replace(content_type=draw.choice(_TYPES))
    if draw.random() < 0.02:
        request = request._replace(method=draw.choice(_METHODS))
    if draw.random() < 0.02:
        request = request._replace(path=_sendable(mutated_bytes(draw, [request.path.encode()]).decode("latin-1")))
    if request.content_type == "application/json":
        return request._replace(body=mutated_json(draw, [request.body])).packed()
    at = request.body.find(b"{")
    if at >= 0 and draw.random() < 0.5:
        end = (request.body + b"\r\n").index(b"\r\n", at)
        changed = mutated_json(draw, [request.body[at:end]])
        return request._replace(body=request.body[:at] + changed + request.body[end:]).packed()
    return request._replace(body=mutated_bytes(draw, [request.body])).packed()
