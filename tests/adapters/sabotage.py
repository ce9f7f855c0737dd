"""Adapters with an error in them, and errors planted on ranks: the kit must see each."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

from gfdit.adapters.base import TaskCall, TaskOutput
from gfdit.adapters.qwen_image import QwenImageAdapter


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
    """Steps look at their latents, and schedulers do what they do by themselves."""
    from gfdit.adapters import denoise_loop

    honest = executor.__dict__.setdefault("honest_predict", (executor.adapter.predict, denoise_loop.WithoutWaits))

    def predict(states: Any) -> Any:
        states[0].latents.sum().item()
        return honest[0](states)

    executor.adapter.predict = predict if on else honest[0]
    setattr(denoise_loop, "WithoutWaits", nullcontext if on else honest[1])  # noqa: B010


def scale_latents(executor: Any, step: int, factor: float) -> None:
    """The step of that index multiplies the latents it has made, from now on."""
    honest = executor.__dict__.setdefault("honest_denoise", executor.adapter.denoise)

    def denoise(calls: list[TaskCall]) -> list[TaskOutput]:
        outputs = honest(calls)
        for call, output in zip(calls, outputs, strict=True):
            if call.task.step_index == step:
                output.artifacts[0]["latents"] = output.artifacts[0]["latents"] * factor
        return outputs

    executor.adapter.denoise = denoise


def mix_neighbours(executor: Any, step: int, part: float) -> None:
    """In that step of a batch, ``part`` of every request's latents are its neighbour's, from now on."""
    honest = executor.__dict__.setdefault("honest_denoise", executor.adapter.denoise)

    def denoise(calls: list[TaskCall]) -> list[TaskOutput]:
        outputs = honest(calls)
        made = [output.artifacts[0]["latents"] for output in outputs]
        if len(calls) > 1 and calls[0].task.step_index == step:
            for output, own, other in zip(outputs, made, [*made[1:], made[0]], strict=True):
                output.artifacts[0]["latents"] = own + part * (other - own)
        return outputs

    executor.adapter.denoise = denoise


class StaleLatents(QwenImageAdapter):
    """Goes on from the latents it has itself, rather than from its inputs: wrong once others have made a step."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        own = self.__dict__.setdefault("own", {})
        for call in calls:
            call.inputs[1]["latents"] = own.get(call.task.request_id, call.inputs[1]["latents"])
        outputs = super().denoise(calls)
        for call, output in zip(calls, outputs, strict=True):
            own[call.task.request_id] = output.artifacts[0]["latents"]
        return outputs


class InPlace(QwenImageAdapter):
    """Steps on its input instead of a new tensor."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        outputs = super().denoise(calls)
        for call, output in zip(calls, outputs, strict=True):
            call.inputs[1]["latents"].copy_(output.artifacts[0]["latents"])
        return outputs


class OnThePipeline(QwenImageAdapter):
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


class Deaf(QwenImageAdapter):
    """Takes one request at a time and does not say why."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        return [output for call in calls for output in super(Deaf, self).denoise([call])]


class FailsInTheMiddle(QwenImageAdapter):
    """One member of a layout fails while its peers wait for it."""

    def denoise(self, calls: list[TaskCall]) -> list[TaskOutput]:
        from vllm_omni.diffusion.distributed.parallel_state import get_sp_group

        if get_sp_group().rank == 1:
            raise RuntimeError("planted failure")
        return super().denoise(calls)
