"""What gfdit's own commands read of a server, whatever that server is."""

from __future__ import annotations

import io
import json

from gfdit.cli.replay import Outcome
from gfdit.cli.server_counters import agreements, as_json, describe, ranks_and_busy_ratio, read_samples
from gfdit.cli.top import View, checked_state
from gfdit.core.json_fields import parse_json
from tests.fuzz.mutation import mutated_bytes, mutated_json
from tests.fuzz.targets import Target

_OUTCOMES = [Outcome("r0", "S", 0.0, 1.0, 0.0, 0.5, 200), Outcome("r1", "S", 0.0, 1.0, 0.0, 0.5, 503, "busy")]


def _counters(data: bytes) -> None:
    """As before a run and after it."""
    text = data.decode("utf-8", "replace")
    samples = read_samples(text)
    rows = agreements(read_samples(text[: len(text) // 2]), samples, _OUTCOMES)
    describe(rows)
    json.dumps(as_json(rows))
    ranks_and_busy_ratio({}, samples, 1.0)


def _top(data: bytes) -> None:
    from rich.console import Console

    view = View("http://server")
    view.take(checked_state(parse_json(data, "http://server"), "http://server"))
    Console(file=io.StringIO(), width=120).print(view.render())


TARGETS = (
    Target("metrics of a server", _counters, mutated_bytes, raises=()),
    Target("the state of a server", _top, mutated_json, names=("http://server",), weight=0.2),
)
