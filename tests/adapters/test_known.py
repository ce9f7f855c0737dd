"""What is said of a request before its model is loaded, for what no test of a family asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gfdit.adapters.forward.known import Sizes, sized
from gfdit.core.tasks import Shape

SAMPLING = SimpleNamespace(height=100, width=64, num_frames=None, max_sequence_length=None)


def look(prompt: Any) -> Shape:
    request = SimpleNamespace(prompt=prompt, sampling_params=SAMPLING)
    return sized(Sizes(), lambda request: False, needs_image=True)(None, request, Shape(512, 512)).shape


@pytest.mark.parametrize("prompt", ["blue", {"prompt": "blue"}, {"multi_modal_data": {"image": []}}], ids=str)
def test_a_model_that_needs_an_image_says_so(prompt: Any) -> None:
    with pytest.raises(ValueError, match="image is missing"):
        look(prompt)


@pytest.mark.parametrize("image", [object(), [object()]])
def test_with_an_image_its_size_is_known(image: Any) -> None:
    assert look({"multi_modal_data": {"image": image}}) == Shape(96, 64)
