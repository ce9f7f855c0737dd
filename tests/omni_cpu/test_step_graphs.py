"""Captured forward passes, with a stand-in for the graph: what is captured, replayed, dropped, and never tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gfdit.omni.step_graphs import StepGraphs


class Recorded:
    """Like a graph: nothing runs when it is captured, and a replay fills the same outputs again."""

    def __init__(self, run: Callable[[], Any], num_bytes: int = 1000) -> None:
        self._run = run
        self.outputs: Any = None
        self.num_bytes = num_bytes

    def replay(self) -> None:
        made = self._run()
        if self.outputs is None:
            self.outputs = made
        else:
            for old, new in zip(self.outputs, made, strict=True):
                old.copy_(new)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor, *, scale: float, text: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self.num_calls += 1
        return (x * scale + text[0].sum(), x + 1)


def test_calls_are_replayed_with_their_own_values() -> None:
    graphs, model, plain, ranks = StepGraphs(1 << 20, Recorded), Model(), Model(), [0]
    graphs.wrap(model, lambda: tuple(ranks))
    kept = []
    for step in range(12):
        ranks = [0, 1] if step % 3 == 2 else [0]
        x, text = torch.full((2, 3), float(step)), [torch.full((4,), float(step % 5))]
        scale = 2.0 if step < 8 else 3.0
        kept.append((model(x, scale=scale, text=text), plain(x, scale=scale, text=text)))
    for found, wanted in kept:  # outputs of earlier replays are the caller's
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    # Before step 8 six calls of one rank, the first two as ever, and two of two ranks; then two of each kind.
    assert graphs.num_replays == 4


def test_what_is_held_is_bounded_and_the_oldest_goes_first() -> None:
    graphs, model = StepGraphs(2100, Recorded), Model()
    graphs.wrap(model, lambda: 0)

    def run(length: int) -> None:
        model(torch.zeros(length), scale=1.0, text=[torch.zeros(1)])

    for length in (1, 2, 1, 2, 1, 2):
        run(length)
    assert graphs.num_replays == 2 and graphs.held_bytes <= 2100
    for _ in range(3):
        run(3)  # in place of length 1
    assert graphs.held_bytes <= 2100
    before = graphs.num_replays
    run(2)
    assert graphs.num_replays == before + 1
    run(1)
    assert graphs.num_replays == before + 1


def test_what_cannot_be_captured_runs_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gfdit.omni")  # whatever a test before this one has set for all of gfdit

    def refuse(run: Callable[[], Any]) -> Recorded:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, model = StepGraphs(1 << 20, refuse), Model()
    graphs.wrap(model, lambda: 0)
    for _ in range(6):
        model(torch.zeros(2), scale=1.0, text=[torch.zeros(1)])
    assert model.num_calls == 6 and len(caplog.records) == 1 and "not permitted" in caplog.text
    # Larger than all there may be: said once, too.
    graphs, model = StepGraphs(10, Recorded), Model()
    graphs.wrap(model, lambda: 0)
    for _ in range(6):
        model(torch.zeros(2), scale=1.0, text=[torch.zeros(1)])
    assert model.num_calls == 6 and graphs.held_bytes == 0 and len(caplog.records) == 2


def test_arguments_that_are_neither_tensors_nor_constants_are_never_captured() -> None:
    graphs, model = StepGraphs(1 << 20, Recorded), Model()
    for _ in range(6):
        graphs.call(lambda thing: model.num_calls, 0, (object(),), {})
    assert graphs.num_replays == 0
