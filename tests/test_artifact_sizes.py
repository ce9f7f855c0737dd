"""The table of artifact sizes: docs have what is computed, for widths that the models have."""

from __future__ import annotations

import inspect

import pytest

from tools import artifact_sizes
from tools.artifact_sizes import Flux, Helios, LongCatImage, QwenImage, StableDiffusion3, Wan, ZImage


def test_the_docs_have_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert artifact_sizes.main(["--check"]) == 0, capsys.readouterr().out


def test_a_figure_that_differs_is_seen() -> None:
    """Negative control."""
    text = artifact_sizes.DOC.read_text()
    assert artifact_sizes.differences(text.replace("77.41 MB", "77.42 MB", 1))
    assert artifact_sizes.differences(text.replace("| Z-Image |", "| Z-Picture |", 1))


@pytest.mark.thorough
def test_widths_are_those_of_the_models() -> None:
    import diffusers

    def default(model: str, name: str) -> int:
        return inspect.signature(getattr(diffusers, model).__init__).parameters[name].default

    assert QwenImage().text_width == default("QwenImageTransformer2DModel", "joint_attention_dim")
    assert QwenImage().channels == default("QwenImageTransformer2DModel", "in_channels")
    assert Flux().text_width == default("FluxTransformer2DModel", "joint_attention_dim")
    assert Flux().pooled_width == default("FluxTransformer2DModel", "pooled_projection_dim")
    assert StableDiffusion3().text_width == default("SD3Transformer2DModel", "joint_attention_dim")
    assert StableDiffusion3().pooled_width == default("SD3Transformer2DModel", "pooled_projection_dim")
    assert ZImage().text_width == default("ZImageTransformer2DModel", "cap_feat_dim")
    assert LongCatImage().text_width == default("LongCatImageTransformer2DModel", "joint_attention_dim")
    assert Wan(16, 8).text_width == default("WanTransformer3DModel", "text_dim")
    assert Helios().text_width == default("HeliosTransformer3DModel", "text_dim")
