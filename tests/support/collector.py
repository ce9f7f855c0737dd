"""What stands in for an OpenTelemetry collector: takes OTLP over HTTP or gRPC, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """A span. Ids in hexadecimal digits, ``parent`` empty for a root; ``events`` are (name, attributes)."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    kind: int
    state: str
    error: str
    is_error: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass
class Collector:
    """``answer`` is the HTTP status it gives."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    num_exports: int = 0
    answer: int = 200

    def take(self, request: Any) -> None:
        found = []
        for of_resource in request.resource_spans:
            resource = attributes_of(of_resource.resource.attributes)
            found += [_received(span, resource) for scope in of_resource.scope_spans for span in scope.spans]
        self.num_exports += 1
        if self.answer == 200:
            self.spans += found

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def of(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]


def attributes_of(fields: Any) -> dict[str, Any]:
    return {field.key: _value(field.value) for field in fields}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        span.trace_state,
        span.status.message,
        span.status.code == 2,
        attributes_of(span.attributes),
        [(event.name, attributes_of(event.attributes)) for event in span.events],
        resource,
    )


@contextmanager
def http_collector(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(data))
            self.send_response(collector.answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the protocol's name)
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
        collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
