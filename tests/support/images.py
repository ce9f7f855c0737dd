"""Image requests to the Python API of vLLM-Omni, for the stock and the elastic engine alike."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.waiting import HANG_S, wait_until


@dataclass(frozen=True)
class ImageRequest:
    height: int
    width: int
    steps: int = 6
    seed: int = 1
    negative_prompt: str | None = None
    num_images: int = 1
    script: str = ""  # for gfdit.policies.layout_script
    prompt: str = "a red panda"
    true_cfg_scale: float = 4.0

    def under(self, script: str) -> ImageRequest:
        return replace(self, script=script)

    def arguments(self) -> tuple[Any, Any]:
        """(prompt, sampling parameters) of vLLM-Omni."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        prompt = {"prompt": self.prompt}
        if self.negative_prompt is not None:
            prompt["negative_prompt"] = self.negative_prompt
        extra_args = {"gfdit": {"slo_class": self.script}} if self.script else {}
        return prompt, OmniDiffusionSamplingParams(
            height=self.height,
            width=self.width,
            num_inference_steps=self.steps,
            seed=self.seed,
            true_cfg_scale=self.true_cfg_scale,
            num_outputs_per_prompt=self.num_images,
            extra_args=extra_args,
        )


def pixels(output: Any) -> np.ndarray:
    """(images, height, width, 3) uint8."""
    return np.stack([np.asarray(image) for image in output.images])


class Engine:
    """An ``AsyncOmni`` on an event loop of its own thread; any number of requests at once.

    ``results`` is what the names of results in shared memory begin with, once its workers are watched.
    """

    results = f"r{os.getpid():x}_"

    def __init__(self, model: Path, **config: Any) -> None:
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.omni = AsyncOmni(model=str(model), enforce_eager=True, dtype="float32", **config)

    def images(self, requests: Sequence[ImageRequest]) -> list[np.ndarray]:
        """Pixels of concurrent requests, in order. Raises the first error."""

        async def all_of_them() -> list[np.ndarray]:
            return await asyncio.gather(*(self._image(request) for request in requests))

        return self._run(all_of_them())

    def image(self, request: ImageRequest) -> np.ndarray:
        return self.images([request])[0]

    async def _image(self, request: ImageRequest) -> np.ndarray:
        prompt, sampling = request.arguments()
        outputs = [output async for output in self.omni.generate(prompt, sampling, request_id="test")]
        return pixels(outputs[-1])

    def begin(self, request: ImageRequest) -> Future[np.ndarray]:
        """Cancelled, it goes away as a client that disconnects does."""
        return asyncio.run_coroutine_threadsafe(self._image(request), self._loop)

    def drained(self) -> bool:
        """No rank holds an artifact. Frees travel behind the answer to the client: they are waited for."""
        return wait_until(lambda: not any(self.call("gfdit_artifacts")), "no rank holds an artifact")

    def watch_workers(self) -> None:
        """Arm the tripwire and mark the results of all workers; again when one has been replaced."""
        self.call("arm_tripwire")
        assert all(name.startswith(self.results) for name in self.call("name_results", self.results))

    def call(self, method: str, *args: Any) -> list[Any]:
        """A method of every rank's worker; values by rank."""
        return self._run(self.omni.collective_rpc(method, args=args))[0]

    def is_healthy(self) -> bool:
        """What ``/health`` would say."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._run(self.omni.check_health())
        except EngineDeadError:
            return False
        return True

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG_S)

    def close(self) -> None:
        self.omni.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)


def stock_images(model: Path, folder: Path, requests: Sequence[ImageRequest], **config: Any) -> list[np.ndarray]:
    """The same requests on the stock engine, one by one, in a process of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {"model": str(model), "config": config, "requests": [asdict(request) for request in requests]}
    (folder / "order.json").write_text(json.dumps(order))
    with (folder / "log").open("w") as log:
        process = subprocess.run(
            [sys.executable, "-m", "tests.support.images", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=HANG_S,
            check=False,
        )
    assert process.returncode == 0, (folder / "log").read_text()[-4000:]
    with np.load(folder / "images.npz") as saved:
        return [saved[f"image{index}"] for index in range(len(requests))]


def _serve_order(folder: Path) -> None:
    from vllm_omni.entrypoints.omni import Omni

    order = json.loads((folder / "order.json").read_text())
    omni = Omni(model=order["model"], enforce_eager=True, dtype="float32", **order["config"])
    made: dict[str, Any] = {}
    for index, fields in enumerate(order["requests"]):
        prompt, sampling = ImageRequest(**fields).arguments()
        made[f"image{index}"] = pixels(omni.generate(prompt, sampling)[0])
    np.savez(folder / "images.npz", **made)
    omni.close()


if __name__ == "__main__":
    from gfdit.omni.plugin import prepare_cpu_process

    prepare_cpu_process()
    _serve_order(Path(sys.argv[1]))
