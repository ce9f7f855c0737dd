"""The page on metrics, the dashboard and the alerts, against the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gfdit.observe import catalogue as names

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
RULES = ROOT / "deploy" / "prometheus" / "gfdit.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "gfdit.json"
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is absent"
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rows_of(start: str) -> list[list[str]]:
    """Of the table on the page whose header begins so."""
    table = PAGE.read_text().partition(start)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def queries() -> Iterator[tuple[str, str]]:
    """Of the dashboard, with the title of the panel."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def rules() -> dict[str, str]:
    """Expressions by name of the record or alert."""
    found = re.split(r"\n      - (?:record|alert): ", RULES.read_text())[1:]
    return {text.partition("\n")[0]: text.partition("\n")[2] for text in found}


def unknown(expression: str) -> set[str]:
    series = {metric.name for metric in names.METRICS if metric.kind != "histogram"}
    for metric in names.METRICS:
        if metric.kind == "histogram":
            series |= {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
    recorded = {name for name in rules() if ":" in name}
    return set(re.findall(r"gfdit[_:][a-z0-9_:]+", expression)) - series - recorded


def test_the_page_has_every_metric() -> None:
    def code(labels: tuple[str, ...]) -> str:
        return ", ".join([f"`{label}`" for label in labels]) or "-"

    wanted = [[f"`{one.name}`", one.kind, code(one.labels), one.unit or "-", one.meaning] for one in names.METRICS]
    assert rows_of("| metric | type |") == wanted


def test_the_page_has_every_reason_and_alert() -> None:
    assert [row[0].strip("`") for row in rows_of("| reason | HTTP |")] == list(names.REASONS)
    alerts = {name: text for name, text in rules().items() if ":" not in name}
    told = {row[0].strip("`"): row[1] for row in rows_of("| alert | severity |")}
    assert told.keys() == alerts.keys()
    for name, text in alerts.items():
        assert f"{{severity: {told[name]}}}" in text, name


def test_the_page_says_what_the_routes_answer() -> None:
    from gfdit.core import Request, Shape
    from gfdit.observe.metrics import ServerMetrics

    server = ServerMetrics(1)
    server.arrived(Request("r1", "m", Shape(64, 64), 4, 0.0))

    def fields(start: str) -> set[str]:
        return {name.strip("`") for row in rows_of(start) for name in row[0].split(", ")}

    assert fields("| field of `load` |") == server.load().keys()
    assert fields("| field of `requests` |") == server.requests()["requests"][0].keys()


def test_every_query_is_of_metrics_that_there_are() -> None:
    expressions = [*queries(), *rules().items()]
    assert len(expressions) > 40
    assert not [(title, unknown(text)) for title, text in expressions if unknown(text)]
    asked = " ".join([text for _, text in queries()])
    missing = [one.name for one in names.METRICS if one.name not in asked]
    covered = {"gfdit_deadlines_met_total", "gfdit_deadlines_missed_total", "gfdit_backlog_rank_seconds"}
    assert not set(missing) - covered, "every metric is on the dashboard, by itself or by a recording rule"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
def test_alerts_come_when_they_should_and_not_before() -> None:
    promtool("check", "rules", RULES)
    promtool("test", "rules", RULES.with_name("gfdit.rules_test.yml"))


@needs_promtool
def test_the_queries_of_the_dashboard_can_be_read(tmp_path: Path) -> None:
    """As rules, since promtool reads no dashboard."""
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for number, (_, text) in enumerate(queries()):
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        lines += [f"      - record: query:{number}", f"        expr: {json.dumps(text)}"]
    path = tmp_path / "dashboard.yml"
    path.write_text("\n".join(lines) + "\n")
    promtool("check", "rules", path)
