"""The tiny checkpoint and the CPU platform under the stock engine: what everything else is compared with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gfdit.cli.main import main
from gfdit.omni.plugin import find_accelerator
from tests.support import local_http
from tests.support.server import ServerError, ServerProcess, free_port, generate_image, start_server

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="serves on the CPU platform")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "qwen-image"
    assert main(["tiny-model", "qwen-image", str(directory), "--seed", "7"]) == 0
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_path = tmp_path_factory.mktemp("log") / "stock.log"
    argv = ["vllm", "serve", str(model), "--omni", "--enforce-eager", "--dtype", "float32"]
    with start_server(argv, free_port(), log_path) as server:
        yield server


def test_same_seed_same_bytes(model: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["tiny-model", "qwen-image", str(again), "--seed", "7"]) == 0
    files = {path.relative_to(model) for path in model.rglob("*") if path.is_file()}
    assert files == {path.relative_to(again) for path in again.rglob("*") if path.is_file()}
    assert all((model / name).read_bytes() == (again / name).read_bytes() for name in files)
    assert sum((model / name).stat().st_size for name in files) < 21e6


def test_seed_and_size_change_the_transformer(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    size = ["--layers", "3", "--heads", "8", "--head-dim", "16"]
    assert main(["tiny-model", "qwen-image", str(other), "--seed", "8", *size]) == 0
    config = json.loads((other / "transformer" / "config.json").read_text())
    assert (config["num_layers"], config["num_attention_heads"], config["attention_head_dim"]) == (3, 8, 16)
    vae = Path("vae") / "diffusion_pytorch_model.safetensors"
    assert (model / vae).read_bytes() != (other / vae).read_bytes()


@pytest.mark.thorough
def test_stock_engine_serves_an_image(server: ServerProcess) -> None:
    request = (server.base_url, "a red panda", (128, 96), 4)
    status, image = generate_image(*request, seed=1)
    assert status == 200 and image.size == (128, 96) and len(image.getcolors(maxcolors=2**16)) > 100
    assert generate_image(*request, seed=1)[1].tobytes() == image.tobytes()
    assert generate_image(*request, seed=2)[1].tobytes() != image.tobytes()
    guided = generate_image(*request, seed=1, negative_prompt="blur", extra_params={"true_cfg_scale": 4.0})
    assert guided[1].tobytes() != image.tobytes()


@pytest.mark.thorough
def test_metrics_count_the_requests(server: ServerProcess) -> None:
    assert "vllm_omni:requests_success" in local_http.get(f"{server.base_url}/metrics").text


@pytest.mark.thorough
def test_a_bad_request_gets_json(server: ServerProcess) -> None:
    status, error = generate_image(server.base_url, "a red panda", (128, 128), steps=-1, seed=1)
    assert status == 400 and "num_inference_steps" in json.dumps(error)


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="unknown command 'no-such-command'"):
        start_server(["gfdit", "no-such-command"], free_port(), tmp_path / "log")
