"""The page on traces and logs, against what spans have and what the code may say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from gfdit.core import Request, Shape
from gfdit.core.tasks import TaskKind
from gfdit.observe import tracing
from gfdit.observe.traces import CopySpan, RequestEvent, TaskSpan
from gfdit.observe.tracing import Ended

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "observability.md"
LEVELS = {
    "warning": "warning",
    "warning_once": "warning",
    "error": "error",
    "exception": "error",
    "critical": "error",
}
# Tools of their own, which log nothing of a server.
ELSEWHERE = ("cli", "testing")


def rows_of(start: str) -> list[list[str]]:
    """Of the table whose header begins so."""
    table = PAGE.read_text().partition(start)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def template(node: ast.expr) -> str:
    """A message with ``%s`` for what differs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr), f"a message is a literal, not {ast.unparse(node)}"
    return "".join([str(part.value) if isinstance(part, ast.Constant) else "%s" for part in node.values])


def messages() -> Iterator[tuple[str, str]]:
    """Every call that logs at WARNING or above, and what stores of templates hand to such a call."""
    for folder in ("gfdit", "policies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not set(path.parts) & set(ELSEWHERE):
                yield from messages_in(path.read_text())


def messages_in(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = ast.unparse(node.func.value), node.func.attr
        if of.endswith("logger") and name in LEVELS:
            yield template(node.args[0]), LEVELS[name]
        elif of == "self" and name == "_on_message" and isinstance(node.args[0], ast.JoinedStr):
            yield template(node.args[0]), "warning"


def test_every_message_of_an_operator_is_on_the_page() -> None:
    told = {row[0].strip("`"): row[1] for row in rows_of("| message | level |")}
    summary = "%d more in the last %.0f s, the last of them: %s"
    assert told.pop(summary) == "as it was"
    said = dict(messages())
    assert len(said) > 30
    assert told == said


def test_a_message_that_is_new_is_found() -> None:
    source = 'logger.warning("one of %d", 1)\nself._logger.exception(f"two {x}")\nlogger.info("three")'
    assert list(messages_in(source)) == [("one of %d", "warning"), ("two %s", "error")]


def test_the_page_has_every_span_attribute_and_event() -> None:
    class Spans:
        """Of spans, their names and attributes."""

        def __init__(self) -> None:
            self.found: dict[str, set[str]] = {}

        def add(self, name: str, *rest: object, **named: object) -> None:
            attributes = next(each for each in rest if isinstance(each, dict))
            self.found.setdefault(name, set()).update(attributes)

    def names(start: str) -> set[str]:
        return {name for row in rows_of(start) for name in re.findall(r"`([^`]+)`", row[0])}

    spans, request = Spans(), Request("r1", "m", Shape(64, 64), 4, 0.0, deadline_s=1.0)
    trace = tracing._Trace(b"", b"", b"", "", True, "client")
    task = TaskSpan("r1", "t", "denoise", "vae", 0, (0,), 1, 1, 1, 1, False, 0.0, 0.0, 0.0)
    copy = CopySpan("r1", "a", (0,), (1,), 1, False, 0.0, 0.0)
    for fact in (task, copy, RequestEvent("r1", "retry", 0.0, "t")):
        tracing._add(spans, trace, fact, int)  # type: ignore[arg-type]
    tracing._add_request(spans, trace, Ended(request, "failed", "why", 1.0, 0.5, False), int)  # type: ignore[arg-type]
    assert names("| attribute of `request` |") == spans.found["request"]
    assert names("| attribute of a task |") == spans.found["denoise"]
    assert names("| attribute of `migrate` |") == spans.found["migrate"]
    reports = (ROOT / "gfdit" / "runtime" / "task_reports.py").read_text()
    assert names("| event of `request` |") == {
        name for name in ("task_failed", "rank_lost", "retry") if f'"{name}"' in reports
    }
    kinds = {kind.value for kind in TaskKind}
    assert {"encode", "prepare", "denoise", "decode"} <= kinds
    assert names("| span | of |") == {"request", "migrate", "encode", "prepare", "denoise", "decode"}
