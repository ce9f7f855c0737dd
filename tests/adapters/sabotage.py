"""Adapters with an error in them, and errors planted on ranks: the kit must see each."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

from gfdit.adapters.base import TaskCall, TaskOutput
from tests.adapters.by_hand import StepExecutionAdapter


def announce_degree(executor: Any, on: bool) -> None:
    """With ``on=False`` the model is not told the degree of a task."""
    from gfdit.omni.task_scope import TaskScope

    original = executor.__dict__.setdefault("honest_enter", TaskScope.enter)

    @contextmanager
    def silent_enter(scope: TaskScope, layout: Any, parallel_config: Any, **rest: Any) -> Any:
        with original(scope, layout, parallel_config, **rest):
            parallel_config.sequence_parallel_size = 1
            yield

    setattr(TaskScope, "enter", original if on else silent_enter)  # noqa: B010


def forget_a_block(executor: Any, on: bool) -> None:
    """In a ring only the own block counts."""
    from gfdit.comm.ring_attention import Partial

    original = executor.__dict__.setdefault("honest_merged", Partial.merged)
    Partial.merged = (lambda self, other: self) if on else original  # type: ignore[method-assign]


def count_padding_in_rings(executor: Any, on: bool) -> None:
    """Tokens that pad the shards are keys like any others."""
    from gfdit.omni import ring

    original = executor.__dict__.setdefault("honest_lengths", ring.num_real)
    setattr(ring, "num_real", (lambda num_tokens, size: num_tokens) if on else original)  # noqa: B010


def count_padding(executor: Any, on: bool) -> None:
    """The same where heads are exchanged."""
    from gfdit.omni import ulysses

    original = executor.__dict__.setdefault("honest_lengths", ulysses.num_real)
    ulysses.num_real = (lambda num_tokens, size: num_tokens) if on else original


def wait_for_the_device(executor: Any, on: bool) -> None:
    """Denoisers look at their latents, and forwards do what they do by themselves."""
    from gfdit.adapters.forward import run

    honest = executor.__dict__.setdefault("honest_waits", (run.WithoutWaits, run.Run._before_denoiser))

    def look(self: Any, name: str, fn: Any, args: Any, kwargs: Any) -> None:
        honest[1](self, name, fn, args, kwargs)
        kwargs["positive_kwargs"]["hidden_states"].sum().item()

    setattr(run, "WithoutWaits", NoMode if on else honest[0])  # noqa: B010
    setattr(run.Run, "_before_denoiser", look if on else honest[1])  # noqa: B010


class NoMode:
    """In place of :class:`gfdit.adapters.forward.waits.WithoutWaits`."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def paused(self) -> Any:
        return nullcontext()


def scale_latents(executor: Any, step: int, factor: float) -> None:
    """The step of that index multiplies the latents it has made, from now on."""
    from functools import partial

    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from gfdit.adapters.forward.run import Run
    from gfdit.adapters.forward.seam import Kind

    honest = executor.__dict__.setdefault("honest_make", Run._make)

    def make(self: Any, kind: Kind, name: str, fn: Any, *rest: Any) -> Any:
        if kind is Kind.STEP and self.num_steps == step:
            made = fn
            # A scheduler's step may return more than tensors.
            fn = partial(
                lambda _, *a, **k: tree_map_only(Tensor, lambda x: x * factor, made(*a, **k)), made.args[0]
            )
        return honest(self, kind, name, fn, *rest)

    setattr(Run, "_make", make)  # noqa: B010


def mix_neighbours(executor: Any, step: int, part: float) -> None:
    """In that step of a batch, ``part`` of every request's noise is its neighbour's, from now on."""
    from torch.utils._pytree import tree_map

    from gfdit.adapters.forward import adapter

    honest = executor.__dict__.setdefault("honest_together", adapter.together)
    honest_predict = executor.adapter._predict_together

    def together(calls: Any, *rest: Any) -> Any:
        make = honest(calls, *rest)
        if executor.adapter.batched_step != step:
            return make
        return lambda number: tree_map(
            lambda own, other: own + part * (other - own), make(number), make((number + 1) % len(calls))
        )

    def predict(calls: list[TaskCall]) -> None:
        executor.adapter.batched_step = calls[0].task.step_index
        honest_predict(calls)

    setattr(adapter, "together", together)  # noqa: B010
    executor.adapter._predict_together = predict


class StaleLatents(StepExecutionAdapter):
    """Goes on from the latents it has itself, rather than from its inputs: wrong once others have made a step."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        own = self.__dict__.setdefault("own", {})
        for call in calls:
            call.inputs[1]["latents"] = own.get(call.task.request_id, call.inputs[1]["latents"])
        outputs = super().denoise(calls)
        for call, output in zip(calls, outputs, strict=True):
            own[call.task.request_id] = output.artifacts[0]["latents"]
        return outputs


class InPlace(StepExecutionAdapter):
    """Steps on its input instead of a new tensor."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        outputs = super().denoise(calls)
        for call, output in zip(calls, outputs, strict=True):
            call.inputs[1]["latents"].copy_(output.artifacts[0]["latents"])
        return outputs


class OnThePipeline(StepExecutionAdapter):
    """Keeps on the pipeline what encoding found out; a rank that did not encode does not know."""

    def encode(self, call: TaskCall) -> TaskOutput:
        assert call.request is not None
        self.pipeline._scale = call.request.sampling_params.true_cfg_scale
        return super().encode(call)

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        scale = getattr(self.pipeline, "_scale", 1.5)
        for call in calls:
            call.inputs[0]["sampling"].true_cfg_scale = scale
        return super().denoise(calls)


class Deaf(StepExecutionAdapter):
    """Takes one request at a time and does not say why."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        return [output for call in calls for output in super(Deaf, self).denoise([call])]


class FailsInTheMiddle(StepExecutionAdapter):
    """One member of a layout fails while its peers wait for it."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        from vllm_omni.diffusion.distributed.parallel_state import get_sp_group

        if get_sp_group().rank == 1:
            raise RuntimeError("planted failure")
        return super().denoise(calls)
