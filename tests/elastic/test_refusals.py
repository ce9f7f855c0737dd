"""What cannot work is refused at start, in one line that says why."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfdit.cli.main import main
from gfdit.omni.plugin import prepare_cpu_process
from tests.support.server import ServerError, free_port, start_server

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "fifo"], "known: "),
        (["--policy", "fcfs", "--policy-arg", "groupsize=2"], "known: group_size"),
        (["--policy-arg", "group_size"], "--policy-arg takes KEY=VALUE"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "2", "--min-sp", "3"], "--min-sp must be from 1 to the number of ranks, 2, got 3"),
        (["--set", "min_sp=2"], "--set min_sp: use --min-sp"),
        (["./no-such-model"], "there is no checkpoint directory ./no-such-model"),
        (
            ["--costs", str(ROOT / "sim/costs/qwen-image-h20.json")],
            "has no times of 'some/model', known: qwen-image; see --model-name",
        ),
        (["--costs", str(ROOT / "pyproject.toml")], "pyproject.toml: not JSON"),
        (["--set", "start_timeout_s"], "--set takes KEY=VALUE"),
        (["--set", "start_timeout=9"], "--set knows no setting 'start_timeout', known: devices, adapter, "),
        (["--set", "start_timeout_s=long"], "--set start_timeout_s=long: Expected float"),
        (["--set", "control_timeout_s=0"], "--set control_timeout_s=0: Expected float > 0"),
        (["--set", "ranks=2"], "--set ranks: use --ranks"),
        (["--", "--stage-overrides", "{}"], "--stage-overrides would replace the one that selects gfdit's engine"),
        (["--", "--stage-overrides={}"], "--stage-overrides would replace"),
        (["--", "--stage_overrides", "{}"], "--stage_overrides would replace"),
        (
            ["--otlp-endpoint", "localhost:4317"],
            "'otlp_endpoint' is 'localhost:4317': expected http://HOST:4318/v1/",
        ),
        (["--set", "otlp_endpoint=x"], "--set otlp_endpoint: use --otlp-endpoint"),
        (["--", "--otlp-traces-endpoint"], "--otlp-traces-endpoint takes a URL"),
        (["--", "--otlp-traces-endpoint", "h"], "gfdit setting 'otlp_endpoint' is 'h'"),
        (
            ["--otlp-endpoint", "grpc://h:1", "--", "--otlp_traces_endpoint=grpc://h:1"],
            "--otlp_traces_endpoint and --otlp-endpoint are two names of one option here",
        ),
    ],
)
def test_serve_refuses_before_it_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = [] if argv[0].startswith(".") else ["some/model"]
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("it starts"))
    assert main(["serve", *model, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gfdit serve: error: ") and message in error and error.count("\n") == 1


def test_serve_sets_what_has_no_option_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def become(_: str, command: list[str]) -> None:
        became.append(command)
        sys.exit()

    monkeypatch.setattr("os.execv", become)
    argv = ["--set", "start_timeout_s=1800", "--set", "max_queue_s=null", "--set", "max_steps=7"]
    with pytest.raises(SystemExit):
        vllms = ["--otlp-traces-endpoint", "http://h:4317", "--stage-init-timeout", "900"]
        main(["serve", "some/model", *argv, "--", *vllms])
    (command,) = became
    stage = json.loads(command[command.index("--stage-overrides") + 1])["0"]
    given = stage["additional_config"]["gfdit"]
    assert given["start_timeout_s"] == 1800.0 and given["max_queue_s"] is None
    assert given["max_steps"] == 7 and given["otlp_endpoint"] == "http://h:4317"
    assert command[-2:] == ["--stage-init-timeout", "900"]


@pytest.fixture(scope="module")
def make_config(model: Path) -> Callable[..., Any]:
    prepare_cpu_process()
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    def make(parallel: dict[str, Any] | None = None, **fields: Any) -> Any:
        config = OmniDiffusionConfig(model=str(model), enforce_eager=True, **fields)
        for name, value in (parallel or {}).items():
            setattr(config.parallel_config, name, value)
        return config

    return make


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, "tensor_parallel_size: its weights would be sharded"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size: its weights would be sharded"),
        ({"parallel": {"use_hsdp": True}}, "use_hsdp: its weights would be sharded"),
        ({"parallel": {"ulysses_degree": 2}}, "ulysses_degree: gfdit chooses it for every task"),
        ({"parallel": {"cfg_parallel_size": 2}}, "cfg_parallel_size: gfdit chooses it for every task"),
        ({"enable_cpu_offload": True}, "enable_cpu_offload"),
        ({"enable_layerwise_offload": True}, "enable_layerwise_offload"),
        ({"cache_backend": "mag_cache"}, "cache_backend: of step caches only 'tea_cache' and 'cache_dit'"),
        ({"diffusion_kv_cache_skip_steps": "0-3"}, "diffusion_kv_cache_skip_steps: steps run one by one"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_cannot_be_elastic(make_config: Callable[..., Any], fields: Any, name: str) -> None:
    from gfdit.omni.compatibility import check_config

    check_config(make_config())
    check_config(make_config(quantization_config="fp8"))
    with pytest.raises(ValueError, match=name):
        check_config(make_config(**fields))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, "no setting 'rank', known: policy,"),
        ({"ranks": "two"}, "'ranks' is 'two': expected int"),
        ({"ranks": 0}, "'ranks' is 0: expected int >= 1"),
        ({"policy": "nope"}, "known: "),
        ({"policy_args": ["group_size"]}, "'policy_args' is .*: expected object"),
        ({"max_steps": 0}, "'max_steps' is 0: expected int >= 1"),
        ({"max_outputs": 0}, "'max_outputs' is 0: expected int >= 1"),
        ({"max_payload_bytes": 0}, "'max_payload_bytes' is 0: expected int >= 1"),
        ({"max_queued_bytes": -1}, "'max_queued_bytes' is -1: expected int >= 1"),
        ({"max_queue_s": 0}, "'max_queue_s' is 0: expected float > 0"),
        ({"control_timeout_s": 0}, "'control_timeout_s' is 0: expected float > 0"),
        ({"control_timeout_s": float("nan")}, "'control_timeout_s' is nan: expected float > 0"),
        ({"start_timeout_s": float("inf")}, "'start_timeout_s' is inf: expected float <= 1000000"),
        ({"max_control_restarts": -1}, "'max_control_restarts' is -1: expected int >= 0"),
        ({"run_ahead": 2}, "'run_ahead' is 2: expected int <= 1"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    from gfdit.omni.settings import Settings

    with pytest.raises(ValueError, match=message):
        Settings.parse({"gfdit": given})


@pytest.mark.thorough
def test_more_ranks_than_devices_fails_the_start(model: Path, tmp_path: Path) -> None:
    argv = ["gfdit", "serve", str(model), "--ranks", "1000", "--", "--enforce-eager", "--dtype", "float32"]
    with pytest.raises(ServerError, match=r"1000 (ranks|device)"):
        start_server(argv, free_port(), tmp_path / "log")


def test_a_request_too_many_is_turned_away_at_once() -> None:
    from vllm_omni.errors import OmniClientError

    from gfdit.observe.metrics import ServerMetrics
    from gfdit.omni.engine import ElasticDiffusionEngine
    from gfdit.omni.settings import Settings

    engine = ElasticDiffusionEngine.__new__(ElasticDiffusionEngine)
    engine.settings, engine.metrics = Settings.parse({"gfdit": {"max_requests": 3}}), ServerMetrics(1)
    engine._submissions, engine._num_alive = queue.Queue(), 2
    engine._submissions.put(None)  # type: ignore[arg-type]  # one more waits to be sent
    with pytest.raises(OmniClientError, match="3 requests are alive already") as refusal:
        engine._add_prepared_request(None)
    assert refusal.value.status_code == 429


def test_every_pipeline_is_scheduled_somehow(capsys: pytest.CaptureFixture[str]) -> None:
    """And what is said of single pipelines is of pipelines that there are."""
    from gfdit.adapters.forward.families import FAMILIES

    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pipelines = {row["pipeline"] for row in rows}
    assert len(pipelines) == 72 and FAMILIES.keys() <= pipelines
    whole = {row["pipeline"] for row in rows if row["why_not"]}
    assert whole == {name for name, family in FAMILIES.items() if family.whole}
    assert len(pipelines - whole) >= 45
    assert main(["models", "NoSuchPipeline"]) == 2
    assert "vLLM-Omni has no pipeline 'NoSuchPipeline'" in capsys.readouterr().err
