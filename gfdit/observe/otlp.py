"""Spans on their way to a collector: OTLP, over HTTP or gRPC.

Messages are filled in directly, since the OpenTelemetry SDK takes several times as long for a span. What it needs
beside the standard library (``pip install gfdit[otel]``; vLLM has it) is imported when an exporter is made.
"""

from __future__ import annotations

import importlib.util
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

TIMEOUT_S = 3.0
_STATUS_ERROR = 2  # STATUS_CODE_ERROR of the protocol
SERVER, INTERNAL = 2, 1  # its kinds of spans
Value = str | int | float | bool | Sequence[int]


class Endpoint(NamedTuple):
    """``url`` for HTTP; for gRPC ``target``, host and port."""

    url: str = ""
    target: str = ""
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """``http://HOST:4318/v1/traces`` is HTTP, ``grpc://HOST:4317`` or a URL without a path gRPC.

        With ``https`` and ``grpcs`` they use TLS. Raises ``ValueError`` for anything else, and where a package is
        missing.
        """
        forms = "http://HOST:4318/v1/traces or grpc://HOST:4317 (https, grpcs: with TLS)"
        parts = urllib.parse.urlsplit(text)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname or port is None:
            raise ValueError(f"expected {forms}")
        needed = ["opentelemetry.proto"]
        has_path = parts.path not in ("", "/")
        if parts.scheme in ("grpc", "grpcs"):
            if has_path:
                raise ValueError(f"gRPC has no path {parts.path!r}, expected {forms}")
            needed.append("grpc")
        elif not has_path:
            needed.append("grpc")
        if missing := [name for name in needed if not _is_there(name)]:
            raise ValueError(f"{missing[0]} is not installed: pip install gfdit[otel]")
        is_secure = parts.scheme in ("https", "grpcs")
        if "grpc" in needed:
            return cls(target=parts.netloc, is_secure=is_secure)
        return cls(url=text, is_secure=is_secure)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Batch:
    """Spans of one export, as a request of the protocol. Times are nanoseconds since 1970."""

    def __init__(self, resource: Mapping[str, Value], version: str) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.request = ExportTraceServiceRequest()
        of_resource = self.request.resource_spans.add()
        _set(of_resource.resource.attributes, resource)
        scope = of_resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "gfdit", version
        self._spans = scope.spans

    def __len__(self) -> int:
        return len(self._spans)

    def add(
        self,
        name: str,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        times_ns: tuple[int, int],
        attributes: Mapping[str, Value],
        *,
        kind: int = INTERNAL,
        state: str = "",
        events: Iterable[tuple[str, int, Mapping[str, Value]]] = (),
        error: str | None = None,
    ) -> None:
        """``parent_id`` is empty for a root, ``state`` the trace's W3C tracestate, ``error`` what went wrong."""
        span = self._spans.add(
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=parent_id,
            name=name,
            kind=kind,
            trace_state=state,
            start_time_unix_nano=times_ns[0],
            end_time_unix_nano=max(times_ns),
        )
        _set(span.attributes, attributes)
        for what, at_ns, details in events:
            event = span.events.add(name=what, time_unix_nano=at_ns)
            _set(event.attributes, details)
        if error is not None:
            span.status.code, span.status.message = _STATUS_ERROR, error


def _set(fields: Any, attributes: Mapping[str, Value]) -> None:
    for key, value in attributes.items():
        field = fields.add(key=key)
        if isinstance(value, str):
            field.value.string_value = value
        elif isinstance(value, bool):
            field.value.bool_value = value
        elif isinstance(value, int):
            field.value.int_value = value
        elif isinstance(value, float):
            field.value.double_value = value
        else:
            numbers = field.value.array_value.values
            for number in value:
                numbers.add(int_value=number)


class Exporter(NamedTuple):
    """``send`` raises whatever the collector or the way to it says."""

    send: Callable[[Batch], None]
    close: Callable[[], None]

    @classmethod
    def of(cls, endpoint: Endpoint) -> Exporter:
        return _over_http(endpoint.url) if endpoint.url else _over_grpc(endpoint)


def _over_http(url: str) -> Exporter:
    # A collector is near: a proxy of the environment is for what is far.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def send(batch: Batch) -> None:
        data, headers = batch.request.SerializeToString(), {"content-type": "application/x-protobuf"}
        with opener.open(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S) as answer:
            answer.read()

    return Exporter(send, lambda: None)


def _over_grpc(endpoint: Endpoint) -> Exporter:
    import grpc
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

    options = [("grpc.enable_http_proxy", 0)]
    if endpoint.is_secure:
        channel = grpc.secure_channel(endpoint.target, grpc.ssl_channel_credentials(), options)
    else:
        channel = grpc.insecure_channel(endpoint.target, options)
    stub = TraceServiceStub(channel)

    def send(batch: Batch) -> None:
        try:
            stub.Export(batch.request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise OSError(error.details() if isinstance(error, grpc.Call) else str(error)) from error

    return Exporter(send, channel.close)
