"""The collectives of a transformer block as operators of torch, so that a compiled block contains them.

A compiler that met a python collective would end its graph there, around every exchange. It takes an operator as
it is, and asks only what shapes come out (the ``fake`` functions). These depend on the inputs and on the degree.
Which ranks are meant, and in which order, is looked up when the operator runs: what the innermost
:func:`collectives_among` of this thread says. So one graph serves every group of one degree.

All ranks of a group must issue their collectives in one order, and each rank compiles for itself. Every operator
therefore says that it changes its first argument, the tensor :func:`order` gives, which nobody reads or writes:
for the compiler each collective depends on the one before, so none is moved past another, merged with one that
looks alike, or removed because nothing uses its result.

They are registered by ``torch.library.Library``, whose operators cost the host about 3 µs a call. So there is one
way and not two: models that are not compiled call them, too.

S need not divide by the degree: L is S / P rounded up, and what the last members have beyond S is not sent, and
comes back as zeros. S is an argument, so one graph serves lengths that divide and such that do not.

Shape letters: B batch, L own image tokens, S image tokens of all members, T replicated (text) tokens, H heads, h
own heads, D head size, P ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from gfdit.comm.group import Group
from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.ring_attention import Block, ring_attention

_library = torch.library.Library("gfdit", "DEF")
_orders: dict[torch.device, torch.Tensor] = {}


class _Members(threading.local):
    """The communicator of what runs on this thread, and its groups by name."""

    comm: GroupFreeComm | None = None
    groups: Mapping[str, Group] = MappingProxyType({})
    rehearsing: bool = False


_members = _Members()


@contextmanager
def collectives_among(comm: GroupFreeComm, **groups: Group) -> Iterator[None]:
    """On this thread the operators mean these groups of ``comm``, until the end of the body."""
    before = _members.comm, _members.groups
    _members.comm, _members.groups = comm, groups
    try:
        yield
    finally:
        _members.comm, _members.groups = before


@contextmanager
def rehearsal() -> Iterator[None]:
    """On this thread no operator communicates: it gives zeros in the shapes that would have come.

    So a rank by itself can compile, and have compiled, what it will run together with others.
    """
    before, _members.rehearsing = _members.rehearsing, True
    try:
        yield
    finally:
        _members.rehearsing = before


def is_rehearsal() -> bool:
    return _members.rehearsing


def shared_with_thread() -> Callable[[], None]:
    """To be called on another thread, which does a part of what runs on this one: its operators mean the same."""
    own = vars(_members).copy()

    def share() -> None:
        vars(_members).clear()
        vars(_members).update(own)

    return share


def order(device: torch.device) -> torch.Tensor:
    """The first argument of every operator whose tensors are on ``device``: always the same tensor."""
    if device not in _orders:
        with torch.inference_mode(False):
            _orders[device] = torch.zeros(1, device=device)
    return _orders[device]


def _looked_up(name: str, degree: int) -> tuple[GroupFreeComm, Group]:
    """Raises ``RuntimeError`` if this thread has no such group, or one of another size than was asked for."""
    comm, group = _members.comm, _members.groups.get(name)
    if comm is None or group is None:
        raise RuntimeError(f"a collective of the group {name!r}, but no task that has one runs on this thread")
    if len(group) != degree:
        raise RuntimeError(f"a collective of {degree} ranks in a task whose group {name!r} is {group.ranks}")
    return comm, group


# Ulysses


def _scatter_heads(
    order: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: list[torch.Tensor],
    text_first: bool,
    num_image: int,
    degree: int,
) -> tuple[torch.Tensor, ...]:
    comm, group = _looked_up("sp", degree)
    tokens = _tokens_of_members(num_image, query.shape[1], degree)
    image: Sequence[torch.Tensor] = (query, key, value)
    if tokens is not None:
        image = [tensor[:, : tokens[group.index]] for tensor in image]
    if not text:
        return comm.scatter_heads(image, group, tokens=tokens)
    joint = comm.empty_for_heads(_joint_shapes(image, text, num_image, degree), query.dtype)
    split = [_text_and_image(tensor, text[0].shape[1], text_first) for tensor in joint]
    for (text_part, _), tensor in zip(split, text, strict=True):
        text_part.copy_(tensor.chunk(degree, dim=2)[group.index])
    comm.scatter_heads(image, group, tokens=tokens, out=[image_part for _, image_part in split])
    return joint


def _tokens_of_members(num_image: int, num_own: int, degree: int) -> list[int] | None:
    """How many of the image's tokens each member has among its ``num_own``; None if all of them are."""
    if num_image == degree * num_own:
        return None
    return [min(max(num_image - index * num_own, 0), num_own) for index in range(degree)]


def _joint_shapes(
    image: Sequence[torch.Tensor], text: Sequence[torch.Tensor], num_image: int, degree: int
) -> list[tuple[int, ...]]:
    """Room for text and image tokens with one member's share of the heads: (B, T + S, H / P, D) each."""
    num_tokens = num_image + (text[0].shape[1] if text else 0)
    return [(t.shape[0], num_tokens, t.shape[2] // degree, t.shape[3]) for t in image]


def _scatter_heads_fake(
    order: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    text: list[torch.Tensor],
    text_first: bool,
    num_image: int,
    degree: int,
) -> tuple[torch.Tensor, ...]:
    image = query, key, value
    shapes = _joint_shapes(image, text, num_image, degree)
    return tuple(t.new_empty(shape) for t, shape in zip(image, shapes, strict=True))


def _gather_heads(
    order: torch.Tensor, tensor: torch.Tensor, num_text: int, text_first: bool, num_own: int, degree: int
) -> torch.Tensor:
    comm, group = _looked_up("sp", degree)
    tokens = _tokens_of_members(tensor.shape[1] - num_text, num_own, degree)
    if num_text == 0 and tokens is None:
        return comm.gather_heads(tensor, group)
    shape = _gathered_shape(tensor, num_text, num_own, degree)
    (output,) = comm.empty_for_heads([shape], tensor.dtype)
    text, image = _text_and_image(tensor, num_text, text_first)
    text_out, image_out = _text_and_image(output, num_text, text_first)
    if tokens is not None:
        num_real = tokens[group.index]
        image_out[:, num_real:].zero_()
        image_out = image_out[:, :num_real]
    comm.gather_heads(image, group, tokens=tokens, out=image_out)
    if num_text:
        comm.gather_heads(text, group, replicated=True, out=text_out)
    return output


def _gather_heads_fake(
    order: torch.Tensor, tensor: torch.Tensor, num_text: int, text_first: bool, num_own: int, degree: int
) -> torch.Tensor:
    return tensor.new_empty(_gathered_shape(tensor, num_text, num_own, degree))


def _gathered_shape(tensor: torch.Tensor, num_text: int, num_own: int, degree: int) -> tuple[int, ...]:
    batch, _, heads, head_size = tensor.shape
    return batch, num_text + num_own, heads * degree, head_size


def _text_and_image(joint: torch.Tensor, num_text: int, text_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of a joint tensor along its tokens, as views."""
    if text_first:
        return joint[:, :num_text], joint[:, num_text:]
    num_image = joint.shape[1] - num_text
    return joint[:, num_image:], joint[:, :num_image]


# A ring


def _attend_in_ring(
    order: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    replicated: list[torch.Tensor],
    replicated_mask: torch.Tensor | None,
    scale: float,
    num_image: int,
    degree: int,
) -> torch.Tensor:
    comm, group = _looked_up("sp", degree)
    num_tokens = degree * key.shape[1]
    if key_mask is None and num_image < num_tokens:  # what evens out the shards goes round with the rest
        key_mask = (torch.arange(num_tokens, device=key.device) < num_image).expand(key.shape[0], num_tokens)
    text = Block(replicated[0], replicated[1], replicated_mask) if replicated else None
    attended = ring_attention(comm, group, query, key, value, scale=scale, key_mask=key_mask, replicated=text)
    return attended.contiguous()


def _attend_in_ring_fake(
    order: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    replicated: list[torch.Tensor],
    replicated_mask: torch.Tensor | None,
    scale: float,
    num_image: int,
    degree: int,
) -> torch.Tensor:
    return query.new_empty(query.shape)


# Whole tensors


def _all_gather(order: torch.Tensor, tensor: torch.Tensor, group: str, degree: int) -> torch.Tensor:
    comm, members = _looked_up(group, degree)
    gathered = _all_gather_fake(order, tensor, group, degree)
    comm.all_gather_into_tensor(gathered, tensor, members)
    return gathered


def _all_gather_fake(order: torch.Tensor, tensor: torch.Tensor, group: str, degree: int) -> torch.Tensor:
    return tensor.new_empty((degree * tensor.shape[0], *tensor.shape[1:]))


def _run_or_rehearse(run: Callable[..., Any], fake: Callable[..., Any], *args: Any) -> Any:
    if not _members.rehearsing:
        return run(*args)
    shapes = fake(*args)
    return tuple(map(torch.zero_, shapes)) if isinstance(shapes, tuple) else shapes.zero_()


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator that ``run`` carries out on tensors and ``fake`` on shapes alone."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, partial(_run_or_rehearse, run, fake), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gfdit::{name}", fake, lib=_library)
    return getattr(torch.ops.gfdit, name).default


#: ``scatter_heads(order, query, key, value, text, text_first, num_image, degree)``: before attention, (B, L, H, D)
#: each to (B, S, h, D), where S is ``num_image``; with ``text``, three of (B, T, H, D) that are the same on all
#: members, to (B, T + S, h, D).
scatter_heads = _define(
    "scatter_heads(Tensor(a!) order, Tensor query, Tensor key, Tensor value, Tensor[] text, bool text_first, "
    "SymInt num_image, SymInt degree) -> (Tensor, Tensor, Tensor)",
    _scatter_heads,
    _scatter_heads_fake,
)
#: ``gather_heads(order, tensor, num_text, text_first, num_own, degree)``: (B, T + S, h, D) back to
#: (B, T + L, H, D), where L is ``num_own``.
gather_heads = _define(
    "gather_heads(Tensor(a!) order, Tensor tensor, SymInt num_text, bool text_first, SymInt num_own, "
    "SymInt degree) -> Tensor",
    _gather_heads,
    _gather_heads_fake,
)
#: ``attend_in_ring(order, query, key, value, key_mask, replicated, replicated_mask, scale, num_image, degree)``:
#: see ``gfdit.comm.ring_attention``; ``replicated`` is nothing, or keys and values that all members have. Without
#: a ``key_mask`` the first ``num_image`` keys count.
attend_in_ring = _define(
    "attend_in_ring(Tensor(a!) order, Tensor query, Tensor key, Tensor value, Tensor? key_mask, "
    "Tensor[] replicated, Tensor? replicated_mask, float scale, SymInt num_image, SymInt degree) -> Tensor",
    _attend_in_ring,
    _attend_in_ring_fake,
)
#: ``all_gather(order, tensor, group, degree)``: (rows, ...) of every member of the group of that name, one after
#: the other: (degree * rows, ...).
all_gather = _define(
    "all_gather(Tensor(a!) order, Tensor tensor, str group, SymInt degree) -> Tensor",
    _all_gather,
    _all_gather_fake,
)
