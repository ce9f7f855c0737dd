"""The engine of the API server without any other process: a test takes the control process's place."""

from __future__ import annotations

import pickle
import queue
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from gfdit.omni.plugin import prepare_cpu_process

prepare_cpu_process()

from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig  # noqa: E402
from vllm_omni.diffusion.request import OmniDiffusionRequest  # noqa: E402
from vllm_omni.inputs.data import OmniDiffusionSamplingParams  # noqa: E402

from gfdit.adapters.engine_half import EngineHalf  # noqa: E402
from gfdit.omni.engine import ElasticDiffusionEngine  # noqa: E402
from gfdit.omni.launcher import ElasticExecutor  # noqa: E402
from gfdit.omni.settings import Settings  # noqa: E402
from gfdit.runtime import messages as msg  # noqa: E402

# Longer than anything here takes on a machine that is busy with something else.
PATIENCE_S = 120.0
_NUM_RANKS = 2


class FakeClient:
    """Has the interface of ``ControlClient``; the test reads what was sent and says what arrives."""

    def __init__(self) -> None:
        self.closed = False
        self.config = SimpleNamespace(run_dir=tempfile.mkdtemp(prefix="lone-engine-"))
        self.changes: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
        self._sent: queue.Queue[Any] = queue.Queue()
        self._arriving: queue.Queue[Any] = queue.Queue()
        # Values of all ranks by method; calls to others are for the test to answer.
        self.answers: dict[str, Any] = {"gfdit_describe": {"sequence_parallel": False, "tiling": None}}

    # The test's side

    def tell(self, *messages: Any) -> None:
        self._arriving.put(list(messages))

    def break_by(self, error: BaseException) -> None:
        """The engine's next look at what has arrived raises ``error``."""
        self._arriving.put(error)

    def sent(self, kind: type) -> Any:
        """The next message of that kind, once it is there."""
        while True:
            message = self._sent.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def sent_call(self, method: str) -> msg.CallWorkers:
        while (call := self.sent(msg.CallWorkers)).method != method:
            pass
        return call

    # The engine's side

    def send(self, message: Any) -> None:
        msg.encode(message)  # as a socket would
        self._sent.put(message)
        if isinstance(message, msg.CallWorkers) and message.method in self.answers:
            value = pickle.dumps(self.answers[message.method])
            self.tell(msg.CallDone(message.call_id, [(True, value)] * _NUM_RANKS))

    def change(self, change_id: int, changes: Mapping[str, Any]) -> None:
        self.changes.put((change_id, changes))

    def wake(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        self.tell()

    def receive(self, timeout_s: float) -> list[Any]:
        try:
            arrived = self._arriving.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if isinstance(arrived, BaseException):
            raise arrived
        return list(arrived)

    def close(self) -> None:
        self.closed = True
        shutil.rmtree(self.config.run_dir, ignore_errors=True)


class LoneExecutor(ElasticExecutor):
    client: Any

    def _init_executor(self) -> None:
        self.client = FakeClient()
        self.heap: Any = SimpleNamespace(unlink=lambda: None)


class LoneEngine(ElasticDiffusionEngine):
    executor: LoneExecutor

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        self.settings = Settings.parse(od_config.additional_config)
        self.num_ranks = _NUM_RANKS
        self.pre_process_func: Any = None
        self.post_process_func = self.prefix_cache_func = None
        self.adapter: Any = EngineHalf(od_config, _NUM_RANKS)
        self.adapter.limits = self.settings.limits
        self.workflows = self.recordings = self.templates = None

    def _init_executor(self, od_config: OmniDiffusionConfig) -> None:
        self.executor = LoneExecutor(od_config, self.settings, self.num_ranks)

    async def ask(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        """The last that the client of ``request`` hears."""
        await self._check_and_start_background_loop()
        stream = self.get_output_stream(self.add_request(request))
        return [output async for output in stream][-1]


@contextmanager
def lone_engine(**settings: Any) -> Iterator[LoneEngine]:
    """Started as a server starts it, but for the warm-up."""
    given = {"warmup_size": 0, **settings}
    config = OmniDiffusionConfig(
        model="none", model_class_name="QwenImagePipeline", additional_config={"gfdit": given}
    )
    engine = LoneEngine(config)
    engine.run_startup_warmup()
    try:
        yield engine
    finally:
        engine.close()


def image_request(request_id: str = "r1", prompt: str = "a red panda", **sampling: Any) -> OmniDiffusionRequest:
    return OmniDiffusionRequest(prompt, OmniDiffusionSamplingParams(**sampling), request_id)
