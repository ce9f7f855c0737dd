"""What forwards are cut with, by itself: tensors without values, calls that stop, joined calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gfdit.adapters.forward.batch import NotAlikeError, Pending, together
from gfdit.adapters.forward.coroutine import Coroutine
from gfdit.adapters.forward.past import Past, PastValueError, past_of, specs_of

CPU = torch.device("cpu")


def past(*shape: int, dtype: torch.dtype = torch.float32) -> Past:
    return past_of(specs_of(torch.empty(shape, dtype=dtype)), CPU)


def test_arithmetic_goes_through_the_past() -> None:
    noise, latents = past(2, 4, 8), torch.randn(2, 4, 8)
    made = torch.cat([(latents + 0.5 * noise)[:, :2].to(torch.bfloat16).transpose(1, 2), past(2, 8, 1)], dim=-1)
    assert isinstance(made, Past) and made.shape == (2, 8, 3) and made.device == CPU
    changed = noise.mul_(2)
    assert changed is noise and isinstance(latents * noise, Past)
    kept = past_of(specs_of({"a": (latents, None), "b": [1, "x"]}), CPU)
    assert isinstance(kept["a"][0], Past) and kept["a"][1] is None and kept["b"] == [1, "x"]


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x.max().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.zeros(4, 8).copy_(x),
        lambda x: torch.zeros(4, 8).add_(x),
        lambda x: torch.zeros(8, 8).index_copy_(0, torch.arange(4), x),
        lambda x: torch.equal(x, torch.zeros(4, 8)),
    ],
)
def test_no_value_comes_out_of_the_past(leak: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(PastValueError):
        leak(past(4, 8))


def test_a_call_stops_goes_on_and_keeps_its_modes() -> None:
    seen: list[Any] = []

    def body() -> str:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in range(2):
                seen.append((number, torch.is_autocast_enabled("cpu")))
                call.suspend()
        return "done"

    call = Coroutine(body, "call")
    assert not call.resume() and not call.resume() and not torch.is_autocast_enabled("cpu")
    assert call.resume() and call.result == "done" and seen == [(0, True), (1, True)]


def test_what_a_call_raises_is_raised_where_it_goes_on() -> None:
    def body() -> None:
        call.suspend()
        raise ValueError("wrong")

    call = Coroutine(body, "call")
    assert not call.resume()
    with pytest.raises(ValueError, match="wrong"):
        call.resume()
    assert call.has_ended


def test_a_call_that_will_not_go_on_is_unwound() -> None:
    unwound: list[torch.Size] = []
    before = threading.active_count()

    def body() -> None:
        held = torch.zeros(1000)
        try:
            call.suspend()
        except Exception:  # what a pipeline may do with its own mistakes
            raise AssertionError("it is no mistake") from None
        finally:
            unwound.append(held.shape)

    call = Coroutine(body, "call")
    call.resume()
    assert call.num_bytes() >= 4000
    call.kill()
    assert unwound and call.has_ended
    call._thread.join()
    assert threading.active_count() == before


def denoiser(hidden_states: Any, encoder_hidden_states: Any, encoder_hidden_states_mask: Any, **rest: Any) -> Any:
    """Sums over the text that the mask lets through, as an attention would."""
    text = encoder_hidden_states
    if encoder_hidden_states_mask is not None:
        text = text * encoder_hidden_states_mask[:, :, None]
    return (hidden_states + text.sum(dim=1, keepdim=True) * rest["scale"],)


def call_of(rows: int, text_tokens: int, **changes: Any) -> Pending:
    kwargs = {
        "hidden_states": torch.randn(rows, 6, 4),
        "encoder_hidden_states": torch.randn(rows, text_tokens, 4),
        "encoder_hidden_states_mask": None,
        "img_ids": torch.zeros(6, 3),
        "img_shapes": [(1, 2, 3)] * rows,
        "scale": 2.0,
    }
    return Pending("transformer", denoiser, (), {**kwargs, **changes})


def test_calls_are_joined_row_by_row() -> None:
    calls = [call_of(1, 5), call_of(2, 3), call_of(1, 5)]  # texts of other lengths are padded
    result = together(calls)
    for number, call in enumerate(calls):
        torch.testing.assert_close(result(number)[0], call.fn(**call.kwargs)[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": 3.0}, "scale differs"),
        ({"hidden_states": torch.zeros(1, 9, 4)}, "shapes of hidden_states differ"),
        ({"img_shapes": None}, "img_shapes is of different types"),
        ({"more": 1}, "different arguments"),
    ],
)
def test_calls_that_are_not_alike_stay_alone(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotAlikeError, match=reason):
        together([call_of(1, 5), call_of(1, 5, **changes)])
