"""The trace file: requests and when they arrive, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gfdit.core.cost.file import CostTable
from gfdit.core.json_fields import JsonFields, parse_json
from gfdit.core.tasks import Request, Shape

MAX_STEPS = 100_000  # each is a task: more is a mistake that would fill the memory


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line. ``arrival_s`` counts from the start of the trace, ``deadline_s`` from the arrival.

    Without ``deadline_s`` the request is late never. A larger ``priority`` is more urgent. An edit paints the
    share ``mask_ratio`` of the image ``template``, in the share ``strength`` of ``num_steps``, by default all.
    """

    id: str
    arrival_s: float
    model: str
    height: int
    width: int
    num_frames: int
    num_steps: int
    cfg: bool = False
    slo_class: str = "default"
    deadline_s: float | None = None
    priority: int = 0
    mask_ratio: float | None = None
    template: str | None = None
    strength: float | None = None

    def request(self, start_s: float = 0.0, *, computed_percent: int = 100) -> Request:
        """For a control plane on whose clock the trace begins at ``start_s``.

        A step of an edit takes ``computed_percent`` of one that leaves nothing out.
        """
        arrival_s = start_s + self.arrival_s
        left_out = int(self.num_steps * (1 - (self.strength or 1.0)))  # as diffusers counts
        return Request(
            id=self.id,
            model=self.model,
            shape=Shape(self.height, self.width, self.num_frames, computed_percent=computed_percent),
            num_steps=max(1, self.num_steps - left_out),
            arrival_s=arrival_s,
            cfg=self.cfg,
            deadline_s=None if self.deadline_s is None else arrival_s + self.deadline_s,
            priority=self.priority,
            slo_class=self.slo_class,
        )


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Raises ``ValueError`` naming file, line and field; ``num_frames`` and what follows it may be left out."""
    requests: list[TraceRequest] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = JsonFields(parse_json(line, where), where)
        request = _read_request(fields)
        if request.id in line_of:
            raise fields.error("id", f"is {request.id!r} again, as in line {line_of[request.id]}")
        if requests and request.arrival_s < requests[-1].arrival_s:
            previous_s = requests[-1].arrival_s
            raise fields.error("arrival_s", f"is {request.arrival_s}, before the line above it at {previous_s}")
        line_of[request.id] = number
        requests.append(request)
    return requests


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """What only edits have is left out of other requests."""
    lines = []
    for request in requests:
        fields = asdict(request)
        for name in ("mask_ratio", "template", "strength"):
            if fields[name] is None:
                del fields[name]
        lines.append(json.dumps(fields) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def check_request(request: TraceRequest, where: str) -> None:
    """Raise ``ValueError`` naming ``where`` and the field for one that a trace file could not have."""
    _read_request(JsonFields(asdict(request), where))


def _read_request(fields: JsonFields) -> TraceRequest:
    request = TraceRequest(
        id=fields.text("id"),
        arrival_s=fields.number("arrival_s", positive=False),
        model=fields.text("model"),
        height=fields.integer("height"),
        width=fields.integer("width"),
        num_frames=fields.integer("num_frames", 1),
        num_steps=fields.integer("num_steps", maximum=MAX_STEPS),
        cfg=fields.flag("cfg", False),
        slo_class=fields.text("slo_class", "default"),
        deadline_s=fields.number_or_none("deadline_s"),
        priority=fields.integer("priority", 0, minimum=None),
        mask_ratio=fields.number_or_none("mask_ratio"),
        template=fields.text_or_none("template"),
        strength=fields.number_or_none("strength"),
    )
    for name in ("mask_ratio", "strength"):
        if (value := getattr(request, name)) is not None and value > 1:
            raise fields.error(name, f"must be at most 1, got {value}")
    fields.end()
    return request


FAR = 2.0  # times the most, or the fewest, tokens that were measured


def far_outside(trace: Iterable[TraceRequest], table: CostTable) -> str | None:
    """A line on the first request whose size is far from all that ``table`` has of its model; None if none is."""
    sizes: dict[str, list[Shape]] = {}
    for entry in table.entries:
        sizes.setdefault(entry.model, []).append(entry.shape)
    ends = {
        model: (min(shapes, key=lambda s: s.num_tokens), max(shapes, key=lambda s: s.num_tokens))
        for model, shapes in sizes.items()
    }
    far = []
    for line in trace:
        shape = Shape(line.height, line.width, line.num_frames)
        least, most = ends.get(line.model, (shape, shape))
        if shape.num_tokens > FAR * most.num_tokens or FAR * shape.num_tokens < least.num_tokens:
            far.append(f"request {line.id} is {shape}, the costs of {line.model} are of {least} to {most}")
    if not far:
        return None
    others = f" (and {len(far) - 1} more)" if len(far) > 1 else ""
    return f"{far[0]}{others}: what it takes is extrapolated"
