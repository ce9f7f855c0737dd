"""What is in deploy/ for several servers says of gfdit only what is true: paths, ports, options, metrics."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from gfdit.cli import agent, serve
from gfdit.observe.catalogue import METRICS

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KNOWN_PATHS = ("/health", "/v1/gfdit/ready", "/metrics")
ENDING_S = 20  # of a server whose requests have ended or been given up: connections, engine, workers


def manifests() -> list[dict[str, Any]]:
    return [one for path in ("gfdit.yaml", "autoscaling.yaml") for one in yaml.safe_load_all(_text(path))]


def _text(name: str) -> str:
    return (KUBERNETES / name).read_text()


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifests() if one["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("Deployment")["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (found,) = [one for one in pod()["containers"] if one["name"] == name]
    there: dict[str, Any] = found
    return there


def parsed(name: str, module: Any) -> argparse.Namespace:
    """The container's command line, by the command's own parser."""
    words: list[str] = [*container(name)["command"], *container(name)["args"]]
    program, command, arguments = words[0], words[1], words[2:]
    assert program == "gfdit" and module.__name__ == f"gfdit.cli.{command}"
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.configure(parser)
    return parser.parse_args(arguments)


def test_a_pod_has_the_time_that_its_requests_have() -> None:
    server = container("server")
    sleep_s = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = sleep_s + parsed("server", serve).shutdown_timeout + ENDING_S
    assert pod()["terminationGracePeriodSeconds"] >= needed_s


def test_ports_ranks_and_probes() -> None:
    server, told = container("server"), parsed("server", serve)
    (http,) = server["ports"]
    assert http == {"name": "http", "containerPort": told.port}
    assert server["resources"]["limits"]["nvidia.com/gpu"] == told.ranks
    for name in ("startupProbe", "livenessProbe"):
        assert server[name]["httpGet"] == {"path": "/health", "port": "http"}
    # Readiness is another question than liveness: a server that drains is alive.
    script = server["readinessProbe"]["exec"]["command"][-1]
    ast.parse(script)
    assert re.findall(r"http://127\.0\.0\.1:(\d+)(/\S+?)\"", script) == [(str(told.port), "/v1/gfdit/ready")]
    assert parsed("agent", agent).url == f"http://127.0.0.1:{told.port}"
    assert container("agent")["ports"] == [{"name": "agent", "containerPort": parsed("agent", agent).port}]


def test_everything_selects_the_pods_and_names_their_ports() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for one in pod()["containers"] for port in one["ports"]}
    for one in manifests():
        if (selector := one["spec"].get("selector")) is not None:
            assert selector.get("matchLabels", selector) == labels, one["kind"]
        if one["kind"] == "Service":
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    (endpoint,) = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports and endpoint["path"] in KNOWN_PATHS
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest("Deployment")["metadata"]["name"])


def test_it_scales_by_a_metric_that_there_is() -> None:
    (metric,) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load(_text("adapter-values.yaml"))["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    series = rule["seriesQuery"].partition("{")[0]
    assert [one.kind for one in METRICS if one.name == series] == ["gauge"]


@pytest.mark.parametrize(
    "path", [path for path in sorted(DEPLOY.rglob("*")) if path.suffix in (".cfg", ".sh", ".yaml", ".py")], ids=str
)
def test_paths_are_those_of_a_server(path: Path) -> None:
    for found in re.findall(r"/v1/gfdit/\w+|/health\b", path.read_text()):
        assert found in (*KNOWN_PATHS, "/v1/gfdit/load"), found
