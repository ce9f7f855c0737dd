"""Attention whose keys go round a ring, against attention to all keys at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gfdit.comm import CommError, GroupFreeComm, ring_attention
from gfdit.comm.beside import Beside
from gfdit.comm.ring_attention import Block
from tests.comm.worlds import run_ranks, run_virtual_ranks

BATCH, HEAD_SIZE = 2, 16
# Measured: outputs of magnitude 1 differ by up to 6e-7.
TOLERANCE = 5e-6


@dataclass(frozen=True)
class Case:
    """``own`` tokens each, the last ``padding`` of all masked; ``text`` replicated ones, one of them masked."""

    ranks: tuple[int, ...]
    own: int
    heads: int = 5
    kv_heads: int = 5
    text: int = 0
    padding: int = 0
    dtype: torch.dtype = torch.float32

    def tensors(self, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query (B, tokens, H, D), key and value (B, tokens, G, D), on any rank the same."""
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = (
            torch.randn((BATCH, num_tokens, count, HEAD_SIZE), generator=generator).to(self.dtype)
            for count in heads
        )
        return query, 2 * key, value


CASES = (
    Case((0, 1, 2), own=7),
    Case((2, 0, 1), own=7, text=5),
    Case((1, 0), own=4, kv_heads=1),
    Case((3, 1, 0, 2), own=3, heads=6, kv_heads=2, text=2, padding=2),
    Case((0, 1, 2), own=2, padding=3),  # one rank has nothing but padding
    Case((2,), own=6, text=3),
)


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(text outputs, image outputs): attention to all keys at once, text first, in float64."""
    num_tokens = len(case.ranks) * case.own
    image, text = case.tensors(num_tokens, 1), case.tensors(case.text, 2)
    q, k, v = (torch.cat(pair, dim=1).double().transpose(1, 2) for pair in zip(text, image, strict=True))
    k, v = (tensor.repeat_interleave(case.heads // case.kv_heads, 1) for tensor in (k, v))
    mask = torch.cat((text_mask(case), image_mask(case)), dim=1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    return out[:, :, : case.text].transpose(1, 2), out[:, :, case.text :].transpose(1, 2)


def image_mask(case: Case) -> torch.Tensor:
    num_tokens = len(case.ranks) * case.own
    return (torch.arange(num_tokens) < num_tokens - case.padding).expand(BATCH, num_tokens)


def text_mask(case: Case) -> torch.Tensor:
    """The second row has one token less than the first."""
    mask = torch.ones((BATCH, case.text), dtype=torch.bool)
    mask[1, case.text - 1 :] = False
    return mask


def largest_error(comm: GroupFreeComm, case: Case) -> float:
    """Of this rank's part of the output."""
    if comm.rank not in case.ranks:
        return 0.0
    group = comm.group(case.ranks)
    start = group.index * case.own
    query, key, value = (
        tensor[:, start : start + case.own] for tensor in case.tensors(len(case.ranks) * case.own, 1)
    )
    text_query, text_key, text_value = case.tensors(case.text, 2)
    out = ring_attention.ring_attention(
        comm,
        group,
        torch.cat((text_query, query), dim=1),
        key,
        value,
        scale=HEAD_SIZE**-0.5,
        key_mask=image_mask(case) if case.padding else None,
        replicated=Block(text_key, text_value, text_mask(case)) if case.text else None,
    )
    assert out.dtype == case.dtype
    text, image = reference(case)
    expected = torch.cat((text, image[:, start : start + case.own]), dim=1)
    return float((out - expected).abs().max())


def errors(comm: GroupFreeComm, cases: Sequence[Case]) -> list[float]:
    return [largest_error(comm, case) for case in cases]


def test_it_is_attention_to_all_keys_at_once() -> None:
    found = run_virtual_ranks(errors, 4, CASES)
    for case, by_rank in zip(CASES, zip(*found, strict=True), strict=True):
        assert max(by_rank) <= TOLERANCE, case


def test_blocks_larger_than_a_slot_between_processes() -> None:
    """Every rank sends before it receives: nobody waits in a circle."""
    case = Case((2, 0, 1), own=64, text=5, padding=1)
    found = run_ranks(errors, 3, [case], slot_bytes=4096)
    assert max(error for by_rank in found for error in by_rank) <= TOLERANCE


def test_half_precision_is_as_good_as_its_inputs() -> None:
    case = Case((0, 1, 2), own=16, text=5, padding=2, dtype=torch.bfloat16)
    found = run_virtual_ranks(errors, 3, [case])
    # Outputs of magnitude 2 in bfloat16, each block rounded once.
    assert max(error for by_rank in found for error in by_rank) <= 3e-2


def test_a_ring_that_skips_a_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one rank's own block instead of the one before it."""
    passed_on = ring_attention._passed_on

    def lossy(beside: Beside, group: object, block: torch.Tensor) -> torch.Tensor:
        received = passed_on(beside, group, block)  # type: ignore[arg-type]
        return block if beside.comm.rank == 0 else received

    monkeypatch.setattr(ring_attention, "_passed_on", lossy)
    found = run_virtual_ranks(errors, 4, CASES[:1])
    assert found[0][0] > 1e3 * TOLERANCE


def test_a_mask_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: padding counts."""
    monkeypatch.setattr(ring_attention, "_bias", lambda mask, q: None)
    found = run_virtual_ranks(errors, 4, CASES[3:5])
    assert min(max(by_rank) for by_rank in zip(*found, strict=True)) > 1e3 * TOLERANCE


def abort_and_begin_afresh(comm: GroupFreeComm) -> tuple[str, float]:
    """What happens to the lane of the queries happens to that of the keys beside it."""
    case, group = Case((0, 1), own=4), comm.group((0, 1))
    beside = comm.beside()
    assert beside is comm.beside() and beside.comm is comm.lane("beside") is not comm
    comm.abort((0, 1))
    try:
        with beside.running(()) as lane:
            lane.barrier(group)
        raised = ""
    except CommError as error:
        raised = type(error).__name__
    comm.reset((0, 1), generation=5)
    return raised, largest_error(comm, case)


def test_the_lane_beside_is_aborted_and_reset_with_its_own() -> None:
    for raised, error in run_ranks(abort_and_begin_afresh, 2):
        assert raised == "CommAborted" and error <= TOLERANCE


def without_such_a_lane(comm: GroupFreeComm) -> float:
    assert comm.beside().comm is comm
    return largest_error(comm, Case((0, 1), own=4))


def test_a_heap_may_have_no_lane_beside() -> None:
    assert max(run_virtual_ranks(without_such_a_lane, 2, lanes=("compute",))) <= TOLERANCE


def test_on_a_gpu_neither_stream_overtakes_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    class Noted(SimpleNamespace):
        def record_stream(self, stream: Stream) -> None:
            events.append(f"kept for {stream.name}")

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    beside: Any = Beside(SimpleNamespace(device=torch.device("cuda")), side)  # type: ignore[arg-type]
    with beside.running([Noted()]):
        events.append("issued")
    beside.join()
    assert events == ["side waits for main", "kept for side", "issued", "main waits for side"]
