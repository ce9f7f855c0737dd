"""The head exchange of Ulysses attention over the host transport."""

from __future__ import annotations

import pytest
import torch

from gfdit.comm import GroupFreeComm
from tests.comm.head_programs import cases, every_subset
from tests.comm.worlds import run_ranks

UNEVEN = [
    (2, (3, 4, 2), (2, 1, 2), (2, 1, 1), 8, torch.bfloat16),  # uneven tokens and heads, grouped
    (1, (5, 5, 5), (1, 2, 1), (1,), 4, torch.float32),
    (1, (4, 1, 0), (1, 1, 1), (3, 3, 3), 5, torch.float16),  # a member without tokens, odd row sizes
]


def test_every_ordered_subset() -> None:
    assert run_ranks(every_subset, 4, (2, 6, (2, 1, 1), 16, torch.bfloat16)) == [48] * 4


def test_uneven_tokens_and_heads() -> None:
    run_ranks(cases, 3, (2, 0, 1), UNEVEN)


def refusals(comm: GroupFreeComm) -> list[str]:
    group = comm.group((0, 1))
    tensor = torch.zeros(1, 4, 3, 8)
    attempts = [
        lambda: comm.scatter_heads([tensor], group),
        lambda: comm.scatter_heads([tensor[0]], group),
        lambda: comm.scatter_heads([tensor, tensor[:, :2]], group),
        lambda: comm.scatter_heads([tensor], group, heads=(1, 2), tokens=(1, 1)),
        lambda: comm.gather_heads(tensor, group, tokens=(1, 2)),
        lambda: comm.gather_heads(tensor, group, out=torch.zeros(1, 2, 6, 9)),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        texts.append(str(caught.value))
    comm.barrier(group)  # nothing was sent: the edges still agree
    return texts


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    texts = run_ranks(refusals, 2)[0]
    assert "3 heads do not divide by 2 ranks" in texts[0]
    assert "(batch, tokens, heads, head size)" in texts[1]
    assert "one batch size, number of tokens" in texts[2]
    assert "tokens says 1 at position 0" in texts[3]
    assert "adds up to 3" in texts[4]
    assert "expected (1, 2, 6, 8)" in texts[5]
