"""Whether a loaded pipeline's ``forward`` can be cut, and how: tried on the pipeline itself, bit by bit.

Two requests that differ in size and steps run whole, one after the other. Then they run in turns, a step at a
time: one is replayed before every step from what would travel, the other goes on where it stopped. If both make
the same bits as before, nothing of a request is kept where gfdit does not look for it.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.request import OmniDiffusionRequest

from gfdit.adapters.base import TaskCall
from gfdit.adapters.forward.verdict import Cut, Keep, Mode, Verdict
from gfdit.core.tasks import Task, TaskKind
from gfdit.migration.codec import Artifact, FieldCodec

if TYPE_CHECKING:
    from gfdit.adapters.forward.adapter import ForwardAdapter

#: What is tried, the cheapest first.
MODES = (Mode(Keep.COMPACT, Cut.STEP), Mode(Keep.FULL, Cut.STEP), Mode(Keep.FULL, Cut.DENOISER))
_MAX_STEPS = 200


def self_test(
    adapter: ForwardAdapter,
    requests: Sequence[OmniDiffusionRequest],
    alone: Callable[[], AbstractContextManager[None]],
) -> Verdict:
    """``requests`` are two of one signature; ``alone`` is what a task of this rank by itself runs in."""
    start_s = time.monotonic()
    try:
        with alone():
            whole = [_pixels(adapter.run_whole(request)) for request in requests]
            before = _global_generators()
            again = _pixels(adapter.run_whole(requests[0]))
            draws = before != _global_generators()
    except Exception as error:
        return Verdict(None, f"it cannot run such a request: {_sentence(error)}")
    if not _same(whole[0], again):
        return Verdict(None, "the same request twice makes different bits" + _because(draws))
    reasons = []
    for mode in MODES:
        try:
            trials = [
                _Trial(adapter, request, mode, alone, replays)
                for request, replays in zip(requests, (True, False), strict=True)
            ]
            _in_turns(trials)
        except Exception as error:
            reasons.append(f"{mode.keep}, cut at each {mode.cut}: {_sentence(error)}")
            continue
        if draws:
            return Verdict(None, "it draws from a random generator that is everybody's")
        if all(_same(trial.pixels, pixels) for trial, pixels in zip(trials, whole, strict=True)):
            steps = tuple(
                (request.sampling_params.num_inference_steps or 0, trial.num_steps)
                for request, trial in zip(requests, trials, strict=True)
            )
            if max(made for _, made in steps) < 2:
                reasons.append(f"{mode.keep}, cut at each {mode.cut}: there is no step to cut at")
                continue
            default = _default_num_steps(adapter, requests[0], mode, alone)
            splits = any(trial.splits_guidance for trial in trials)
            return Verdict(mode, "", splits, steps, default, time.monotonic() - start_s)
        reasons.append(f"{mode.keep}, cut at each {mode.cut}: other bits")
    return Verdict(None, "; ".join(reasons), seconds=time.monotonic() - start_s)


class _Trial:
    """One request under way, a task at a time."""

    def __init__(
        self,
        adapter: ForwardAdapter,
        request: OmniDiffusionRequest,
        mode: Mode,
        alone: Callable[[], AbstractContextManager[None]],
        replays: bool,
    ) -> None:
        self._adapter = adapter
        self._request = request
        self._mode = mode
        self._alone = alone
        self._replays = replays
        self._artifacts: tuple[Artifact, ...] = ()
        self.num_steps = 0
        self.pixels: list[Any] | None = None
        self.splits_guidance = False

    def next(self) -> bool:
        """Run the next task; returns whether that was the last one."""
        adapter = self._adapter
        with self._alone():
            if not self._artifacts:
                self._artifacts = adapter.encode(self._call(TaskKind.ENCODE), self._mode).artifacts
            elif self._artifacts[1]["output"] is not None:
                self.pixels = _pixels(self._artifacts[1]["output"])
                return True
            elif self.num_steps == _MAX_STEPS:
                raise RuntimeError(f"it is not through after {_MAX_STEPS} steps")
            else:
                if self._replays:
                    self._artifacts = tuple(_sent(artifact, adapter.device) for artifact in self._artifacts)
                (latents,) = adapter.step(self._call(TaskKind.DENOISE)).artifacts
                self._artifacts = self._artifacts[0], latents
                self.num_steps += latents["output"] is None or self._mode.cut is Cut.DENOISER
                self.splits_guidance = self._artifacts[1]["splits_guidance"]
        return False

    def _call(self, kind: TaskKind) -> TaskCall:
        task = Task(f"{self._request.request_id}/{kind}", self._request.request_id, kind, self.num_steps, (), ())
        return TaskCall(task, self._artifacts, None if self._artifacts else self._request)


def _in_turns(trials: list[_Trial]) -> None:
    left = list(trials)
    while left:
        left = [trial for trial in left if not trial.next()]


def _sent(artifact: Artifact, device: torch.device) -> Artifact:
    """As it would be on another rank."""
    codec = FieldCodec()
    parts = codec.pack(artifact)
    parts.tensors = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    return codec.unpack(parts, device)


def _default_num_steps(
    adapter: ForwardAdapter,
    request: OmniDiffusionRequest,
    mode: Mode,
    alone: Callable[[], AbstractContextManager[None]],
) -> int | None:
    """Of a request that does not say; None if only running it would tell."""
    silent = copy.copy(request)
    silent.sampling_params = copy.copy(request.sampling_params)
    silent.sampling_params.num_inference_steps = None
    try:
        with alone():
            return adapter.planned_steps(silent, mode)
    except Exception:
        return None


def _global_generators() -> tuple[Any, ...]:
    """State of those that nobody passes round."""
    states: list[Any] = [
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        pickle.dumps(np.random.get_state()),
    ]
    if torch.cuda.is_available():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return tuple(states)


def _pixels(output: DiffusionOutput) -> list[Any]:
    return tree_leaves((output.output, output.media))


def _same(one: list[Any] | None, other: list[Any] | None) -> bool:
    return one is not None and other is not None and len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, Image.Image):
        return one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):  # media in a class of its own
        names = [field.name for field in dataclasses.fields(one)]
        return _same(*(tree_leaves([getattr(each, name) for name in names]) for each in (one, other)))
    return bool(one == other)


def _sentence(error: Exception) -> str:
    first = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__


def _because(draws: bool) -> str:
    return ": it draws from a random generator that is everybody's" if draws else ""
