"""Collectives as operators of torch: the shapes a compiler is told, their order in a graph, and whom they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gfdit.comm import Group, GroupFreeComm, operators
from tests.comm.worlds import run_ranks, run_virtual_ranks

# Batch, own image tokens, text tokens, heads and head size.
B, L, T, H, D = 2, 3, 5, 4, 8
ORDER = operators.order(torch.device("cpu"))


def _heads(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(B, num_tokens, H, D, generator=torch.Generator().manual_seed(seed))


def _calls(degree: int) -> dict[str, Callable[[], Any]]:
    """One call of every operator, and of every form that its outputs take."""
    q, k, v = (_heads(L, seed) for seed in range(3))
    text = [_heads(T, seed) for seed in range(3, 6)]
    joint = torch.zeros(B, T + degree * L, H // degree, D)
    mask = torch.ones(B, degree * L, dtype=torch.bool)
    return {
        "scatter": lambda: operators.scatter_heads(ORDER, q, k, v, [], True, degree * L, degree),
        "scatter with text": lambda: operators.scatter_heads(ORDER, q, k, v, text, False, degree * L, degree),
        "scatter uneven": lambda: operators.scatter_heads(ORDER, q, k, v, text, True, degree * L - 1, degree),
        "gather": lambda: operators.gather_heads(ORDER, joint[:, T:], 0, True, L, degree),
        "gather with text": lambda: operators.gather_heads(ORDER, joint, T, True, L, degree),
        "gather uneven": lambda: operators.gather_heads(ORDER, joint[:, 1:], T, False, L, degree),
        "gather uneven alone": lambda: operators.gather_heads(ORDER, joint[:, T + 1 :], 0, True, L, degree),
        "ring": lambda: operators.attend_in_ring(ORDER, q, k, v, None, [], None, 0.1, degree * L, degree),
        "ring with text": lambda: operators.attend_in_ring(
            ORDER, q, k, v, mask, text[:2], None, 0.1, degree * L, degree
        ),
        "all-gather": lambda: operators.all_gather(ORDER, q, "sp", degree),
    }


def _layouts(outputs: Any) -> list[tuple]:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


def _real_layouts(comm: GroupFreeComm) -> dict[str, list[tuple]]:
    group = comm.group((1, 0))
    with operators.collectives_among(comm, sp=group):
        return {name: _layouts(call()) for name, call in _calls(2).items()}


def test_outputs_are_as_the_compiler_is_told() -> None:
    """Without a communicator, too: a rehearsal needs none."""
    with operators.rehearsal():
        told = {name: _layouts(call()) for name, call in _calls(2).items()}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert {name: _layouts(call()) for name, call in _calls(2).items()} == told
    assert run_ranks(_real_layouts, 2) == [told, told]


def test_rehearsals_give_zeros() -> None:
    with operators.rehearsal():
        assert operators.is_rehearsal()
        gathered = operators.all_gather(ORDER, _heads(L), "cfg", 3)
    assert gathered.shape[0] == 3 * B and not gathered.any() and not operators.is_rehearsal()


def _mistakes(comm: GroupFreeComm) -> list[str]:
    messages = []
    with operators.collectives_among(comm, sp=comm.group((0,))):
        for name, degree in (("cfg", 1), ("sp", 2)):
            with pytest.raises(RuntimeError) as caught:
                operators.all_gather(ORDER, _heads(L), name, degree)
            messages.append(str(caught.value))
    with pytest.raises(RuntimeError, match="no task"):
        operators.all_gather(ORDER, _heads(L), "sp", 1)
    return messages


def test_a_group_that_is_not_there_or_of_another_size_is_refused() -> None:
    ((unknown, other),) = run_virtual_ranks(_mistakes, 1)
    assert "'cfg'" in unknown and "2 ranks" in other and "(0,)" in other


# What a compiler may do to them


class _Recorder:
    """In place of a communicator: remembers what was gathered, in order."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        self.sums.append(float(x.sum()))
        out.copy_(x)


@contextmanager
def _recorded() -> Iterator[list[float]]:
    recorder = _Recorder()
    alone = Group((0,), 0, 0, ())
    with operators.collectives_among(recorder, sp=alone):  # type: ignore[arg-type]
        yield recorder.sums


def _block(gather: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Four collectives: the second's result is used first, the third is the first again, nobody uses the last."""

    def block(x: torch.Tensor) -> torch.Tensor:
        first, second, again = gather(x), gather(x * 2), gather(x)
        gather(x * 3)
        return second.cos() + first.sin() + again

    return block


# The operator, but for its first argument: what a compiler takes for a function of its inputs.
_library = torch.library.Library("gfdit_tests", "DEF")
_library.define("unordered_gather(Tensor tensor) -> Tensor")
_library.impl(
    "unordered_gather",
    lambda tensor: operators.all_gather(ORDER, tensor, "sp", 1),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("gfdit_tests::unordered_gather", torch.empty_like, lib=_library)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_graphs_keep_every_collective_in_its_place(backend: str) -> None:
    def ordered(x: torch.Tensor) -> torch.Tensor:
        return operators.all_gather(ORDER, x, "sp", 1)

    assert _issued(ordered, backend) == [6.0, 12.0, 6.0, 18.0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_without_an_order_a_graph_loses_collectives(backend: str) -> None:
    assert len(_issued(torch.ops.gfdit_tests.unordered_gather.default, backend)) < 4


def _issued(gather: Callable[[torch.Tensor], torch.Tensor], backend: str) -> list[float]:
    """The sums of what a compiled block has gathered, which computes what it should."""
    block, x = _block(gather), torch.tensor([1.0, 2.0, 3.0])
    torch._dynamo.reset()
    with torch.inference_mode(), _recorded() as sums:
        expected = block(x)
        sums.clear()
        torch.testing.assert_close(torch.compile(block, backend=backend, fullgraph=True)(x), expected)
    return sums
