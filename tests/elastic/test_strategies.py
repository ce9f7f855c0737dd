"""vLLM-Omni's attention layer under Ulysses or a ring, on virtual ranks, against the same layer on one rank."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from gfdit.adapters.sequence_plan import SHARD_GROUP
from gfdit.comm import Group, GroupFreeComm, spawn
from gfdit.comm.group import make_group
from gfdit.core import ExecutionLayout, ParallelSpec
from gfdit.omni.plugin import prepare_cpu_process
from tests.support.waiting import HANG_S

BATCH, HEAD_SIZE = 2, 16
# Measured: outputs of magnitude 1 differ by up to 5e-7.
TOLERANCE = 5e-6


@dataclass(frozen=True)
class Case:
    """``image`` tokens are split, padded where they do not divide; ``text`` ones replicated, before or behind.

    With ``plan`` the split is that of a plan of gfdit's, whose models join text and image in one tensor, or name
    the text in the metadata.
    """

    ranks: tuple[int, ...]
    image: int
    heads: int = 6
    kv_heads: int = 6
    text: int = 0
    side: str = "front"
    plan: Literal["", "one tensor", "metadata"] = ""

    def tensors(self, num_tokens: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return [torch.randn((BATCH, num_tokens, count, HEAD_SIZE), generator=generator) for count in heads]

    @property
    def text_mask(self) -> torch.Tensor:
        """The second row has one token less than the first; plans take no masks."""
        mask = torch.ones((BATCH, self.text), dtype=torch.bool)
        mask[1, -1:] = bool(self.plan)
        return mask

    @property
    def padding(self) -> int:
        return -self.image % len(self.ranks)


CASES = (
    Case((1, 0), 8),
    Case((2, 0, 1), 9, text=4),
    Case((2, 0, 1), 10, text=4, side="rear"),
    Case((3, 1, 0, 2), 8),  # rings from here: the heads do not divide
    Case((3, 1, 0, 2), 8, text=4),
    Case((3, 1, 0, 2), 9, text=4, side="rear"),
    Case((0, 1, 2, 3), 10),
    Case((2, 1, 0), 7, kv_heads=2, text=3),  # those of keys and values do not
)
PLANNED = (
    Case((1, 0), 9, text=4, plan="one tensor"),
    Case((2, 0, 1), 10, plan="one tensor"),  # image tokens attend alone
    Case((2, 0, 1), 10, text=4, plan="metadata"),
    Case((3, 1, 0, 2), 8, text=4, plan="one tensor"),  # rings from here
    Case((3, 1, 0, 2), 9, text=4, plan="one tensor"),
    Case((3, 1, 0, 2), 5, text=4, plan="one tensor"),  # a rank has nothing but padding
    Case((0, 1, 2, 3), 10, plan="one tensor"),
    Case((3, 1, 0, 2), 9, text=4, plan="metadata"),
)


class Sharded:
    """Stands for the configuration that a layer reads its degree from."""

    parallel_config = SimpleNamespace(sequence_parallel_size=2)


@pytest.fixture(scope="module", autouse=True)
def platform() -> Iterator[None]:
    """Everything is imported before ranks wait for each other."""
    prepare_cpu_process()
    importlib.import_module("gfdit.omni.ring")
    yield


def make_layer(case: Case) -> Any:
    from vllm_omni.diffusion.attention.layer import Attention

    return Attention(case.heads, HEAD_SIZE, False, HEAD_SIZE**-0.5, num_kv_heads=case.kv_heads)


def expected(case: Case) -> torch.Tensor:
    """(B, text + image, H, D): the layer's kernel on all tokens, text first."""
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    image, text = case.tensors(case.image, 1), case.tensors(case.text, 2)
    joined = [torch.cat(pair, dim=1) for pair in zip(text, image, strict=True)]
    mask = None
    if case.text:
        mask = torch.cat((case.text_mask, torch.ones((BATCH, case.image), dtype=torch.bool)), dim=1)
    return make_layer(case).attention.forward(*joined, AttentionMetadata(attn_mask=mask))


def attended(comm: GroupFreeComm, layers: list[Any], case: Case, ring: bool) -> torch.Tensor | None:
    """(B, text + own image tokens, H, D) of this rank, text first; None if it takes no part."""
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    from gfdit.omni.joint_attention import JointAttention
    from gfdit.omni.ring import GroupFreeRing, UlyssesOrRing, allow_ring
    from gfdit.omni.task_scope import TaskScope
    from gfdit.omni.ulysses import GroupFreeUlysses

    if comm.rank not in case.ranks:
        return None
    layer, scope = layers[comm.rank], TaskScope.alone(comm.rank, comm)
    ulysses = GroupFreeUlysses(scope)
    exchange = UlyssesOrRing(scope, ulysses, GroupFreeRing(scope)) if ring else ulysses
    layer.parallel_strategy = JointAttention(scope, exchange) if case.plan else exchange
    if ring:
        allow_ring(layer, "layer", scope)
    size = len(case.ranks)
    own = (case.image + case.padding) // size
    first = case.ranks.index(comm.rank) * own
    padding = [torch.full_like(part, 7.0) for part in case.tensors(case.padding, 3)]  # anything: it must not count
    image = [torch.cat(pair, dim=1) for pair in zip(case.tensors(case.image, 1), padding, strict=True)]
    own_image = [part[:, first : first + own] for part in image]
    metadata = None
    if case.plan == "one tensor":
        own_image = [torch.cat(pair, dim=1) for pair in zip(case.tensors(case.text, 2), own_image, strict=True)]
    elif case.text:
        query, key, value = case.tensors(case.text, 2)
        metadata = AttentionMetadata(
            joint_query=query,
            joint_key=key,
            joint_value=value,
            joint_attn_mask=None if case.plan else case.text_mask,
            joint_strategy=case.side,
        )
    layout = ExecutionLayout(case.ranks, ParallelSpec(size))
    with torch.inference_mode(), scope.enter(layout, SimpleNamespace(sequence_parallel_size=1)):
        out = layer(*own_image, metadata)
    if case.side == "rear":
        out = torch.cat((out[:, own:], out[:, :own]), dim=1)
    return out


def largest_error(case: Case, ring: bool) -> float:
    from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context

    layers = [copy.deepcopy(make_layer(case)) for _ in range(4)]
    with set_forward_context(omni_diffusion_config=Sharded()):
        # What the hooks leave there when they pad.
        if case.plan:
            get_forward_context().sp_shard_metadata[SHARD_GROUP] = case.image
        else:
            get_forward_context().sp_original_seq_len = case.image if case.padding else None
        found = spawn(
            attended, 4, heap="local", args=(layers, case, ring), comm_timeout_s=HANG_S, timeout_s=HANG_S
        )
    parts = [found[rank] for rank in case.ranks]
    image = torch.cat([part[:, case.text :] for part in parts], dim=1)[:, : case.image]
    reference = expected(case)
    errors = [(part[:, : case.text] - reference[:, : case.text]).abs() for part in parts]
    errors.append((image - reference[:, case.text :]).abs())
    return max(float(error.max()) for error in errors if error.numel())


@pytest.mark.parametrize("case", CASES + PLANNED, ids=str)
def test_it_is_the_layer_on_one_rank(case: Case) -> None:
    assert largest_error(case, ring=True) <= TOLERANCE


@pytest.mark.parametrize("case", CASES[:3] + PLANNED[:3], ids=str)
def test_ulysses_alone(case: Case) -> None:
    assert largest_error(case, ring=False) <= TOLERANCE


def test_without_a_ring_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="6 attention heads do not divide by sequence-parallel degree 4"):
        largest_error(CASES[3], ring=False)


@pytest.mark.parametrize("case", [CASES[2], CASES[6]], ids=str)
def test_padding_that_counts_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, of Ulysses and of a ring."""
    from gfdit.omni import ring, ulysses

    for module in (ring, ulysses):
        monkeypatch.setattr(module, "num_real", lambda num_tokens, size: num_tokens)
    assert largest_error(case, ring=True) > 1e3 * TOLERANCE


def test_padding_that_counts_in_a_ring_of_a_plan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    from gfdit.omni import ring

    monkeypatch.setattr(ring, "num_real", lambda num_tokens, size: num_tokens)
    assert largest_error(PLANNED[4], ring=True) > 1e3 * TOLERANCE


def under_a_plan(comm: GroupFreeComm, mask: torch.Tensor | None, side: str) -> str:
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
    from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context

    from gfdit.omni.joint_attention import JointAttention
    from gfdit.omni.task_scope import TaskScope
    from gfdit.omni.ulysses import GroupFreeUlysses

    scope = TaskScope.alone(comm.rank, comm)
    metadata = AttentionMetadata(attn_mask=mask, joint_strategy=side)
    with set_forward_context(omni_diffusion_config=Sharded()):
        get_forward_context().sp_shard_metadata[SHARD_GROUP] = 4
        try:
            tensor = torch.zeros(1, 4, 3, 8)
            JointAttention(scope, GroupFreeUlysses(scope)).pre_attention(tensor, tensor, tensor, metadata)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("mask", "side", "message"),
    [(torch.ones(1, 4), "front", "attention with attn_mask"), (None, "rear", "attention with joint_strategy")],
)
def test_what_a_plan_of_gfdit_s_cannot_heed_is_refused(mask: torch.Tensor | None, side: str, message: str) -> None:
    (text,) = spawn(under_a_plan, 1, heap="local", args=(mask, side), comm_timeout_s=HANG_S, timeout_s=HANG_S)
    assert message in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "layer blocks.0.attn: its attention is causal"),
        ({"_kv_cache_dtype": "fp8"}, "layer blocks.0.attn: its keys and values are quantized"),
        ({"attention": torch.nn.Identity()}, "layer blocks.0.attn: its kernel is a module"),
    ],
    ids=["causal", "quantized", "module"],
)
def test_layers_that_cannot_use_a_ring_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    from gfdit.omni.ring import allow_ring

    layer = make_layer(CASES[0])
    for name, value in change.items():
        delattr(layer, name) if name == "attention" else None
        setattr(layer, name, value)
    with pytest.raises(ValueError, match=message):
        allow_ring(layer, "blocks.0.attn", None)  # type: ignore[arg-type]


def four_dimensional_mask(comm: GroupFreeComm) -> str:
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    from gfdit.omni.ring import GroupFreeRing
    from gfdit.omni.task_scope import TaskScope

    tensor = torch.zeros(1, 4, 3, 8)
    metadata = AttentionMetadata(attn_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    try:
        GroupFreeRing(TaskScope.alone(comm.rank, comm)).pre_attention(tensor, tensor, tensor, metadata)
    except ValueError as error:
        return str(error)
    return ""


def test_a_mask_that_a_ring_cannot_heed_is_refused() -> None:
    texts = spawn(four_dimensional_mask, 2, heap="local", comm_timeout_s=HANG_S, timeout_s=HANG_S)
    assert all("attn_mask of keys, (batch, tokens), got (1, 1, 4, 4)" in text for text in texts)


@pytest.mark.parametrize(("device", "ranks", "met"), [("cuda", (1, 0), 1), ("cuda", (0,), 0), ("cpu", (1, 0), 0)])
def test_members_of_a_task_meet_by_one_warp(device: str, ranks: tuple[int, ...], met: int) -> None:
    from gfdit.omni.task_scope import TaskScope

    class Comm(SimpleNamespace):
        def group(self, ranks: Sequence[int]) -> Group:
            return make_group(ranks, rank=0, world_size=2, session=1)

        def barrier(self, group: Group) -> None:
            self.met.append(group.ranks)

    comm: Any = Comm(device=torch.device(device), met=[])
    alone = comm.group((0,))
    with patch("gfdit.comm.operators.order", lambda device: torch.zeros(1)):
        scope = TaskScope(0, comm, sp=alone, cfg=alone, decode=alone)
    layout = ExecutionLayout(ranks, ParallelSpec(sp=len(ranks)))
    with scope.enter(layout, SimpleNamespace(sequence_parallel_size=1)):
        assert comm.met == [ranks] * met
