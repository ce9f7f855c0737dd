from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gfdit.core import Shape
from gfdit.sim.trace import TraceRequest, read_trace, write_trace

LINE = {
    "id": "a",
    "arrival_s": 0.5,
    "model": "wan",
    "height": 480,
    "width": 832,
    "num_frames": 49,
    "num_steps": 50,
    "cfg": True,
    "slo_class": "S",
    "deadline_s": 8.0,
    "priority": 2,
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_survives_the_file(tmp_path: Path) -> None:
    requests = [TraceRequest(**LINE), TraceRequest("b", 1.0, "qwen", 512, 512, 1, 20)]  # type: ignore[arg-type]
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    assert read_trace(path) == requests
    assert json.loads(path.read_text().splitlines()[0]) == LINE


def test_a_trace_of_edits_survives_the_file(tmp_path: Path) -> None:
    edits = [TraceRequest(**LINE, mask_ratio=0.25, template="t1")]  # type: ignore[arg-type]
    path = tmp_path / "trace.jsonl"
    write_trace(path, edits)
    assert read_trace(path) == edits
    assert json.loads(path.read_text()) == LINE | {"mask_ratio": 0.25, "template": "t1"}


def test_what_may_be_left_out(tmp_path: Path) -> None:
    short = {name: LINE[name] for name in ("id", "arrival_s", "model", "height", "width", "num_steps")}
    (request,) = read_trace(write(tmp_path / "t.jsonl", "", short, ""))
    assert (request.num_frames, request.cfg, request.slo_class) == (1, False, "default")
    assert (request.deadline_s, request.priority) == (None, 0)
    assert request.request().deadline_s is None


def test_as_a_request_on_another_clock() -> None:
    request = TraceRequest(**LINE).request(start_s=100.0)  # type: ignore[arg-type]
    assert (request.arrival_s, request.deadline_s) == (100.5, 108.5)
    assert request.shape == Shape(480, 832, 49)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "field 'id' must be a non-empty string, got ''"),
        ({"id": "a"}, "field 'id' is 'a' again, as in line 1"),
        ({"arrival_s": -1}, "field 'arrival_s' must be a non-negative number, got -1"),
        ({"arrival_s": 0.25}, "field 'arrival_s' is 0.25, before the line above it at 0.5"),
        ({"height": 0}, "field 'height' must be an integer of at least 1, got 0"),
        ({"num_steps": "50"}, "field 'num_steps' must be an integer of at least 1, got '50'"),
        ({"num_steps": 10**6}, "field 'num_steps' must be an integer of at most 100000, got 1000000"),
        ({"width": 10**30}, "field 'width' must be an integer of at most 9007199254740992, got 1000000"),
        ({"arrival_s": 10**400}, "field 'arrival_s' must be a non-negative number, got 1000000"),
        ({"deadline_s": float("inf")}, "field 'deadline_s' must be a positive number, got inf"),
        ({"cfg": None}, "field 'cfg' must be true or false, got None"),
        ({"deadline_s": 0}, "field 'deadline_s' must be a positive number, got 0"),
        ({"priority": 1.5}, "field 'priority' must be an integer, got 1.5"),
        ({"mask_ratio": 1.5}, "field 'mask_ratio' must be at most 1, got 1.5"),
        ({"strength": 2}, "field 'strength' must be at most 1, got 2"),
        ({"mask_ratio": 0}, "field 'mask_ratio' must be a positive number, got 0"),
        ({"template": ""}, "field 'template' must be a non-empty string, got ''"),
        ({"deadline_ms": 1}, "field 'deadline_ms' is unknown, known: id, arrival_s, "),
    ],
)
def test_a_wrong_line_is_refused_with_file_line_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "t.jsonl", LINE, LINE | {"id": "b"} | change)
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert f"{path}, line 2: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'id': 1}", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"[1]", "must be an object, got [1]"),
        (b'{"id": "\xff"}', "not JSON: 'utf-8' codec can't decode byte 0xff in position 8"),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"id": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
    ],
)
def test_a_line_that_is_not_json(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 2: {message}")


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """A separator that only Python takes for the end of a line may stand in a text."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(LINE | {"id": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [request.id for request in read_trace(path)] == ["a\u2028b"]
