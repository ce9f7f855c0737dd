"""Base of adapters for pipelines whose text is embedded twice: token by token, and as a whole ("pooled")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.utils import StepRequestState

from gfdit.adapters.base import Trajectory
from gfdit.adapters.denoise_loop import DenoiseLoopAdapter, rows
from gfdit.adapters.prompts import given_embeddings, negative_text, positive_text
from gfdit.adapters.sampling import check_max_sequence_length, image_size


class PooledTextAdapter(DenoiseLoopAdapter):
    """A family embeds one text in :meth:`embed`; both branches of guidance are put together here."""

    captures_steps = True
    batches = True
    max_text_tokens: ClassVar[int]

    def embed(self, sampling: Any, **text: Any) -> dict[str, torch.Tensor]:
        """``prompt_embeds`` (images, T, D), ``pooled`` (images, D), and by name what else goes into ``extra``.

        ``text`` are arguments of the pipeline's ``encode_prompt``: the prompt, or embeddings that came with it.
        """
        raise NotImplementedError

    def is_guided(self, prompt: Any, sampling: Any) -> bool:
        """Whether both branches of guidance run."""
        raise NotImplementedError

    # Engine half

    def convert(self, request: OmniDiffusionRequest, max_sp: int | None) -> Trajectory:
        check_max_sequence_length(request.sampling_params, self.max_text_tokens)
        given_embeddings(request.prompt)
        return super().convert(request, max_sp)

    def uses_cfg(self, request: OmniDiffusionRequest) -> bool:
        return self.is_guided(request.prompt, request.sampling_params)

    # Worker half

    def encode_state(self, state: StepRequestState) -> None:
        sampling = state.sampling
        sampling.height, sampling.width = image_size(sampling)
        state.do_true_cfg = self.is_guided(state.prompt, sampling)
        self._embed_branch(state, "", positive_text(state.prompt))
        if state.do_true_cfg:
            self._embed_branch(state, "negative_", negative_text(state.prompt) or "")

    def _embed_branch(self, state: StepRequestState, sign: str, text: str) -> None:
        given = given_embeddings(state.prompt)
        tokens, pooled = given[f"{sign}prompt_embeds"], given[f"{sign}pooled_prompt_embeds"]
        made = self.embed(
            state.sampling,
            prompt=[text] if tokens is None else None,
            prompt_embeds=tokens,
            pooled_prompt_embeds=pooled,
        )
        setattr(state, f"{sign}prompt_embeds", made.pop("prompt_embeds"))
        state.extra.update({f"{sign}{name}": tensor for name, tensor in made.items()})

    def prepare_steps(self, state: StepRequestState) -> None:
        """Timesteps for as many tokens as ``state.latents`` has, and a scheduler of the request's own."""
        sampling = state.sampling
        num_steps = sampling.num_inference_steps or self.default_num_steps
        state.timesteps, _ = self.pipeline.prepare_timesteps(num_steps, sampling.sigmas, state.latents.shape[1])
        state.scheduler = self.own_scheduler()

    def text_arguments(self, states: Sequence[StepRequestState], sign: str) -> dict[str, torch.Tensor]:
        """Arguments of the transformer for one branch of guidance; ``sign`` is "" or "negative_"."""
        latents = [state.latents for state in states]
        return {
            "encoder_hidden_states": rows([getattr(state, f"{sign}prompt_embeds") for state in states], latents),
            "pooled_projections": rows([state.extra[f"{sign}pooled"] for state in states], latents),
        }

    def predict_guided(
        self, states: Sequence[StepRequestState], scale: float, common: dict[str, Any]
    ) -> torch.Tensor:
        """The transformer's prediction, guided; ``common`` are its arguments for both branches."""
        guided = states[0].do_true_cfg
        return self.pipeline.predict_noise_maybe_with_cfg(
            guided,
            scale,
            {**common, **self.text_arguments(states, "")},
            {**common, **self.text_arguments(states, "negative_")} if guided else None,
            False,
        )
