"""The server that `gfdit profile` measures: a real one, recorded, whose requests bring their own layouts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from gfdit.cli.replay import ReplayOptions, replay
from gfdit.cli.server_process import free_port, start_server
from gfdit.core import ParallelSpec, Shape, TaskKind
from gfdit.core.events import RequestArrived
from gfdit.observe.recording import RecordingReader
from gfdit.observe.samples import Samples
from gfdit.sim.trace import MAX_STEPS, TraceRequest

# A rank that has begun a request ends it before the next.
POLICY = ("--policy", "gfdit.policies.layout_script:LayoutScript", "--policy-arg", "interleave=false")
START_TIMEOUT_S = 1800.0  # a large checkpoint may come from a slow disk
RECORDING_TIMEOUT_S = 30.0  # how far the recording may be behind the answers


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to send: ``script`` has its layouts."""

    shape: Shape
    cfg: bool
    num_steps: int
    script: str


class MeasurementError(RuntimeError):
    """A request failed; the message says which and why."""


class ProfileServer:
    """``samples`` has everything measured so far. ``command`` is a whole `gfdit serve` without a policy; every
    request comes with ``input_image``, a PNG, if there is one, and ``extra_params`` for the model.

    Raises :class:`~gfdit.cli.server_process.ServerError` if the server does not come up.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        request_timeout_s: float,
        input_image: bytes | None = None,
        extra_params: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.samples = Samples()
        self._input_image = input_image
        self._extra_params = extra_params
        self._request_timeout_s = request_timeout_s
        self._num_requests = 0
        with ExitStack() as stack:
            recording = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "recording.jsonl"
            end = command.index("--") if "--" in command else len(command)
            argv = [*command[:end], *POLICY, "--record", str(recording), *command[end:]]
            server = stack.enter_context(start_server(argv, free_port(), log_path, START_TIMEOUT_S))
            self._base_url = server.base_url
            self._reader = stack.enter_context(RecordingReader(recording))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, requests: Sequence[Wanted], mask_image: bytes | None = None) -> list[RequestArrived]:
        """Send them all at the same time; what the engine made of them.

        With a ``mask_image``, a PNG, they are edits that compute the tokens under it in all steps but the first.
        Raises :class:`MeasurementError` if one fails.
        """
        trace = []
        for request in requests:
            self._num_requests += 1
            trace.append(
                TraceRequest(
                    id=f"profile-{self._num_requests}",
                    arrival_s=0.0,
                    model="",
                    height=request.shape.height,
                    width=request.shape.width,
                    num_frames=request.shape.num_frames,
                    num_steps=request.num_steps,
                    cfg=request.cfg,
                    slo_class=request.script,
                )
            )
        known = set(self.samples.arrived)
        extra_params, image = dict(self._extra_params), self._input_image or mask_image
        if mask_image is not None:
            extra_params["gfdit"] = {"edit": {"mode": "own", "refresh_every": 1 + MAX_STEPS}}
        options = ReplayOptions(self._base_url, True, self._request_timeout_s, image, mask_image, extra_params)
        for outcome, request in zip(replay(trace, options), requests, strict=True):
            if outcome.error:
                raise MeasurementError(f"{request.shape}: status {outcome.status}: {outcome.error}")
        self._read_until_completed(len(known) + len(trace))
        return [arrived for name, arrived in self.samples.arrived.items() if name not in known]

    def _read_until_completed(self, num_requests: int) -> None:
        deadline_s = time.monotonic() + RECORDING_TIMEOUT_S
        while len(self.samples.completed) < num_requests:
            self.samples.add(self._reader.entries())
            if time.monotonic() > deadline_s:
                raise MeasurementError("the server's recording does not tell the end of a request it has answered")
            time.sleep(0.005)


def script_on(
    ranks: Sequence[int],
    parallel: ParallelSpec,
    batch: int = 1,
    tasks: Container[TaskKind] = (TaskKind.DENOISE,),
) -> str:
    """A request with ``tasks`` on ``ranks`` and all others on the first of them, ``batch`` steps at once."""
    first, everywhere = str(ranks[0]), ",".join(map(str, ranks))
    decoders = everywhere if TaskKind.DECODE in tasks else first
    steps = f"{parallel}@{everywhere}" if TaskKind.DENOISE in tasks else f"sp1@{first}"
    words = [f"encode@{first}", f"prepare@{first}", f"decode@{decoders}", steps]
    return " ".join([*words, f"batch={batch}"] if batch > 1 else words)


def script_between(one: int, other: int) -> str:
    """A request that changes ranks at every step."""
    return f"encode@{one} prepare@{one} sp1@{other} sp1@{one} decode@{one}"
