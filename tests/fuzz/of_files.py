"""Files that people write, keep or get from elsewhere."""

from __future__ import annotations

import math
import os
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from gfdit.comm.selector_table import SelectorTable
from gfdit.core.cost import UnknownCostError
from gfdit.core.cost.file import CostTable
from gfdit.core.cost.table import TableCostModel
from gfdit.core.layouts import ExecutionLayout
from gfdit.core.policy import TaskView
from gfdit.core.policy.loading import load_policy
from gfdit.core.tasks import TaskKind
from gfdit.observe.recording import RecordingReader
from gfdit.observe.timeline import read_timeline
from gfdit.sim.compare import PolicyChoice
from gfdit.sim.importers import GENTD26, Condition, LogFormat, read_log, spread_ties
from gfdit.sim.options import SimulationOptions
from gfdit.sim.recorded import recorded_trace
from gfdit.sim.replay import replay
from gfdit.sim.simulator import Simulator
from gfdit.sim.trace import far_outside, read_trace, write_trace
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.units import DamagedError, map_unit
from tests.fuzz.mutation import mutated_bytes, mutated_json, mutated_json_lines
from tests.fuzz.strategies import dumped, fields
from tests.fuzz.targets import Target, of_file, scratch_file

_POSITIVE = st.floats(1e-3, 1e6)
_SIDE = st.sampled_from((64, 256, 512, 1024, 4096)) | st.integers(1, 2**53)
_MODEL = st.sampled_from(("qwen-image", "flux", "wan", "é"))


# Trace files


def _trace(path: Path) -> None:
    requests = read_trace(path)
    again = scratch_file("again.jsonl")
    write_trace(again, requests)
    assert read_trace(again) == requests, "what was written is read otherwise"
    for request in requests:
        made = request.request()
        assert made.num_steps >= 1, "a request of no steps"
        assert math.isfinite(made.arrival_s) and (made.deadline_s is None or math.isfinite(made.deadline_s))
        msgspec.msgpack.encode(made)


_TRACE_LINE = fields(
    {
        "id": st.text(min_size=1, max_size=8),
        "arrival_s": st.floats(0, 1e6),
        "model": _MODEL,
        "height": _SIDE,
        "width": _SIDE,
        "num_steps": st.integers(1, 60),
    },
    {
        "num_frames": st.integers(1, 200),
        "cfg": st.booleans(),
        "slo_class": st.text(max_size=5),
        "deadline_s": st.none() | _POSITIVE,
        "priority": st.integers(),
        "mask_ratio": st.none() | st.floats(0, 1),
        "template": st.none() | st.text(max_size=4),
        "strength": st.none() | st.floats(0, 1),
    },
)
_TRACE = st.lists(_TRACE_LINE, max_size=4).map(lambda lines: b"\n".join(map(dumped, lines)))

# Cost tables


def _costs(path: Path) -> None:
    table = CostTable.load(path)
    again = scratch_file("again.json")
    table.save(again)
    assert CostTable.load(again) == table, "what was written is read otherwise"
    cost = TableCostModel(table)
    for entry in table.entries[:3]:
        view = TaskView(
            "t",
            "r",
            entry.model,
            entry.task,
            0,
            entry.shape,
            entry.cfg,
            (entry.parallel,),
            (("r/latents/0", (0,)),),
        )
        layout = ExecutionLayout(tuple(range(min(64, entry.parallel.size))), entry.parallel)
        for shape in (entry.shape, entry.shape._replace(height=16, width=16), entry.shape._replace(height=4096)):
            try:
                seconds = cost.task_s(msgspec.structs.replace(view, shape=shape), layout, entry.batch)
            except UnknownCostError:
                continue
            assert seconds > 0 and not math.isnan(seconds), f"a task takes {seconds} s"
        assert cost.copy_s(entry.model, entry.shape, entry.cfg, "latents", 2) >= 0


_ENTRY = fields(
    {
        "model": _MODEL,
        "task": st.sampled_from(list(TaskKind)),
        "height": _SIDE,
        "width": _SIDE,
        "num_frames": st.integers(1, 200),
        "cfg": st.booleans(),
        "sp": st.sampled_from((1, 2, 4, 8)),
        "cfg_parallel": st.just(1),
        "batch": st.integers(1, 4),
        "seconds": _POSITIVE,
    }
)
_COSTS = fields(
    {
        "version": st.just(1),
        "hardware": st.text(min_size=1, max_size=5),
        "source": st.text(min_size=1, max_size=5),
        "migration": fields({"latency_s": st.floats(0, 1), "bytes_per_s": _POSITIVE}),
        "entries": st.lists(_ENTRY, min_size=1, max_size=3),
    },
    {
        "ranks_per_node": st.integers(1, 8),
        "artifacts": st.lists(
            fields(
                {
                    "model": _MODEL,
                    "artifact": st.just("latents"),
                    "height": _SIDE,
                    "width": _SIDE,
                    "num_frames": st.just(1),
                    "cfg": st.booleans(),
                    "bytes": st.integers(1, 2**53),
                }
            ),
            max_size=2,
        ),
        "masked_steps": st.lists(
            fields({"model": _MODEL, "unmasked_share": st.floats(0, 1), "r_squared": st.floats(0, 1)}), max_size=2
        ),
        "exchanges": st.lists(
            fields({"model": _MODEL, "num_all_to_alls": st.integers(1, 200), "bytes_per_token": _POSITIVE}),
            max_size=2,
        ),
    },
).map(dumped)

# A trace and a cost table together: what `gfdit sim` is given

_SMALL_TRACE_BYTES = 4000  # a simulation takes time in proportion to the steps


def _simulated(data: bytes) -> None:
    """Both in one input, a line with the table and then the trace: every request comes to an end."""
    table_path, trace_path = scratch_file("table.json"), scratch_file("trace.jsonl")
    head, _, rest = data.partition(b"\n")
    table_path.write_bytes(head)
    trace_path.write_bytes(rest[:_SMALL_TRACE_BYTES])
    table = CostTable.load(table_path)
    trace = [replace(one, num_steps=min(one.num_steps, 20)) for one in read_trace(trace_path)]
    if not trace:
        return
    far_outside(trace, table)
    done = Simulator(PolicyChoice("triage").load(), table, trace, SimulationOptions(4)).run()
    assert not done.faults, done.faults[0]
    assert all(one.end_s is not None for one in done.requests), "a request did not end"


# Recordings


def _recording(path: Path) -> None:
    with RecordingReader(path) as recording:
        for _ in recording.entries():
            pass
    with RecordingReader(path) as recording:
        for _ in recording.steps():
            pass


def _recorded_trace(path: Path) -> None:
    requests, _ = recorded_trace(path)
    again = scratch_file("again.jsonl")
    write_trace(again, requests)
    assert read_trace(again) == requests, "the trace is none"


def _replayed(path: Path) -> None:
    replay(path)


def _timeline(path: Path) -> None:
    for span in read_timeline(path):
        assert math.isfinite(span.duration_s) and isinstance(span.request, str)


# Logs of other services


def _log(log: LogFormat) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        requests = spread_ties(read_log(path, log, ("m", "n")))
        assert all(math.isfinite(one.arrival_s) for one in requests), "a time that is no number"
        assert len(requests) <= 1_000_000, "more requests than a trace can have"

    return run


_EVERY_COLUMN = LogFormat(
    types.MappingProxyType(
        {
            **{"arrival": "time", "model": "model", "steps": "steps", "size": "size", "frames": "frames"},
            **{"images": "images", "class": "class", "deadline": "deadline"},
        }
    ),
    where=(Condition("kind", "x", equal=False),),
    model_names=types.MappingProxyType({"*": "m"}),
)
_CELL = st.one_of(
    st.sampled_from(("", "0", "1", "30.0", "1e400", "nan", "-1", "512x512", "1024", "9x9x9", "m", "n", '"', "x")),
    st.sampled_from(("2024-11-15 16:57:50", "2024/11/15", "0001-01-01T00:00+23:59", "9999-12-31T23:59:59-23:59")),
    st.text(max_size=6),
)
_CSV = st.lists(st.lists(_CELL, min_size=1, max_size=9), max_size=5).map(
    lambda rows: "\n".join(
        ["time,model,steps,size,frames,images,class,deadline,kind", *(",".join(row) for row in rows)]
    ).encode("utf-8", "surrogatepass")
)

# Tables of collectives


def _collectives(path: Path) -> None:
    table = SelectorTable.load(path)
    again = scratch_file("again.json")
    table.save(again)
    assert SelectorTable.load(again) == table, "what was written is read otherwise"


_COLLECTIVES = fields(
    {
        "version": st.just(1),
        "hardware": st.text(max_size=5),
        "source": st.text(max_size=5),
        "entries": st.lists(
            fields(
                {
                    "operation": st.sampled_from(("all_to_all", "broadcast", "send", "all_gather")),
                    "ranks": st.integers(1, 8),
                    "bytes": st.integers(0, 2**40),
                    "path": st.sampled_from(("push", "direct_pull", "low_latency", "tma")),
                    "chunk_bytes": st.integers(0, 2**30),
                    "programs": st.integers(1, 64),
                    "seconds": _POSITIVE,
                }
            ),
            max_size=3,
        ),
    }
).map(dumped)

# Templates

UNIT_KEY = UnitKey(TemplateKey("ab" * 32), 1, 0, 2)


def _unit(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        unit = map_unit(fd, UNIT_KEY, check=True)
    finally:
        os.close(fd)
    unit.exact(unit.values.dtype).float().sum()


def _with_right_checksum(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One in two says something else and is consistent in itself, as a unit of another build may be."""
    from gfdit.templates import units

    data = draw.choice(seeds)
    if draw.random() < 0.5 or len(data) <= units.PAGE_BYTES or not data.startswith(b"gfdit-kv"):
        return mutated_bytes(draw, seeds)
    _, _, num_bytes, _ = units._START.unpack_from(data)
    record = data[units._START.size : units._START.size + num_bytes]
    return units_file(mutated_json(draw, [record]), data[units.PAGE_BYTES :])


def units_file(text: bytes, values: bytes) -> bytes:
    """A unit's file with such a record, whatever it says, under a checksum that is right."""
    import zlib

    from gfdit.templates import units

    text = text[: units.PAGE_BYTES - units._START.size]
    page = units._START.pack(b"gfdit-kv", units.VERSION, len(text), zlib.crc32(text)) + text
    return page.ljust(units.PAGE_BYTES, b"\0") + values


# Policies


def _policy(path: Path) -> None:
    load_policy(f"{path}:OldestWidest", {})


def _cut(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A file whose writing was broken off, or with a character too many or too few somewhere.

    Words are left as they are: whatever they say would be run.
    """
    data = draw.choice(seeds)
    at = draw.randrange(len(data))
    match draw.randrange(3):
        case 0:
            return data[:at]
        case 1:
            return (
                data[:at] + draw.choice((b"(", b")", b":", b"\0", b"\xff", b"\n", b'"', b"\t", b",")) + data[at:]
            )
        case _:
            return data[:at] + data[at + 1 :]


TARGETS = (
    Target("trace files", of_file(_trace, "t.jsonl"), mutated_json_lines, lambda: _TRACE, ("t.jsonl",), weight=3),
    Target("cost tables", of_file(_costs, "c.json"), mutated_json, lambda: _COSTS, ("c.json",), weight=3),
    Target(
        "simulations",
        _simulated,
        mutated_json_lines,
        names=("table.json", "trace.jsonl", "request", "cost"),
        weight=0.5,
    ),
    Target("recordings", of_file(_recording, "r.jsonl"), mutated_json_lines, names=("r.jsonl",), weight=1),
    Target(
        "traces of recordings",
        of_file(_recorded_trace, "r.jsonl"),
        mutated_json_lines,
        names=("r.jsonl",),
        folder="recordings",
    ),
    Target(
        "replays",
        of_file(_replayed, "r.jsonl"),
        mutated_json_lines,
        names=("r.jsonl", "policy"),
        folder="recordings",
    ),
    Target("timelines", of_file(_timeline, "t.json"), mutated_json_lines, names=("t.json",)),
    Target("logs", of_file(_log(_EVERY_COLUMN), "l.csv"), mutated_bytes, lambda: _CSV, ("l.csv",), weight=2),
    Target("logs of GenTD26", of_file(_log(GENTD26), "l.csv"), mutated_bytes, names=("l.csv",)),
    Target(
        "tables of collectives",
        of_file(_collectives, "comm.json"),
        mutated_json,
        lambda: _COLLECTIVES,
        ("comm.json",),
        weight=2,
    ),
    Target("units of templates", of_file(_unit, "1-0-2.kv"), _with_right_checksum, raises=(DamagedError,)),
    Target("policy files", of_file(_policy, "p.py"), _cut, names=("p.py",), weight=0.3),
)
