"""The all-to-all of Ulysses attention between heads and tokens, without a permute around it.

Scattering takes (B, L, H, D), all heads of the own tokens, to (B, S, h, D), the own heads of all tokens;
gathering takes it back. Only data moves: results are bit-identical to any other way of moving it.

Shape letters: B batch, L own tokens, S tokens of all members, H heads, h own heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from gfdit.comm.checks import check_same_dtype
from gfdit.comm.heap import Call, PeerSlice, Plan, Transport


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Tensors of one exchange, checked. By group position: ``tokens`` and ``units`` of each member.

    A unit is the same share of the heads of every tensor: all its heads divided by ``sum(units)``. ``gather`` is
    the direction. ``replicated`` (gathering only): all members have the same tokens, instead of one part each.
    """

    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    tokens: tuple[int, ...]
    units: tuple[int, ...]
    gather: bool
    replicated: bool = False

    @property
    def token_offsets(self) -> tuple[int, ...]:
        if self.replicated:
            return (0,) * len(self.tokens)
        return tuple(accumulate(self.tokens[:-1], initial=0))

    @property
    def unit_offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.units[:-1], initial=0))

    def unit_heads(self, tensor: int) -> int:
        """Heads of one unit of a tensor."""
        whole = self.targets[tensor] if self.gather else self.sources[tensor]
        return whole.shape[2] // sum(self.units)

    def output_shapes(self, position: int) -> list[tuple[int, ...]]:
        """Of the targets of the member at ``position``."""
        batch = self.sources[0].shape[0]
        tokens = self.tokens[position] if self.gather else sum(self.tokens)
        units = sum(self.units) if self.gather else self.units[position]
        heads = [units * self.unit_heads(number) for number in range(len(self.sources))]
        return [(batch, tokens, count, x.shape[3]) for count, x in zip(heads, self.sources, strict=True)]

    def parts(self, position: int, *, outgoing: bool) -> list[torch.Tensor]:
        """Of each source what goes to ``position``, or of each target what comes from there: heads or tokens."""
        tensors = self.sources if outgoing else self.targets
        if outgoing is self.gather:
            return [x.narrow(1, self.token_offsets[position], self.tokens[position]) for x in tensors]
        sizes = [self.unit_heads(index) for index in range(len(tensors))]
        begin, units = self.unit_offsets[position], self.units[position]
        return [x.narrow(2, begin * size, units * size) for x, size in zip(tensors, sizes, strict=True)]


def scatter_exchange(
    tensors: Sequence[torch.Tensor],
    group_size: int,
    index: int,
    *,
    tokens: Sequence[int] | None,
    heads: Sequence[int] | None,
    out: Sequence[torch.Tensor] | None,
) -> HeadExchange:
    """Checked scatter; see ``GroupFreeComm.scatter_heads``. Raises ValueError."""
    _check_tensors("tensors", tensors)
    whole = min(tensor.shape[2] for tensor in tensors)
    units = _splits("heads", heads, whole, group_size)
    for tensor in tensors:
        if tensor.shape[2] % sum(units):
            raise ValueError(f"{tensor.shape[2]} heads cannot be split like {sum(units)}")
    own = tensors[0].shape[1]
    all_tokens = _sizes("tokens", tokens, own, group_size)
    if all_tokens[index] != own:
        raise ValueError(f"tokens says {all_tokens[index]} at position {index}, the tensors have {own}")
    shapes = [(t.shape[0], sum(all_tokens), t.shape[2] // sum(units) * units[index], t.shape[3]) for t in tensors]
    return HeadExchange(tuple(tensors), _outputs(tensors, shapes, out), all_tokens, units, gather=False)


def gather_exchange(
    tensor: torch.Tensor,
    group_size: int,
    index: int,
    *,
    tokens: Sequence[int] | None,
    heads: Sequence[int] | None,
    replicated: bool,
    out: torch.Tensor | None,
) -> HeadExchange:
    """Checked gather; see ``GroupFreeComm.gather_heads``. Raises ValueError."""
    _check_tensors("tensor", [tensor])
    units = _sizes("heads", heads, tensor.shape[2], group_size)
    if units[index] != tensor.shape[2]:
        raise ValueError(f"heads says {units[index]} at position {index}, the tensor has {tensor.shape[2]}")
    if replicated:
        all_tokens = (tensor.shape[1],) * group_size
    else:
        all_tokens = _splits("tokens", tokens, tensor.shape[1], group_size)
        if sum(all_tokens) != tensor.shape[1]:
            raise ValueError(f"tokens adds up to {sum(all_tokens)}, the tensor has {tensor.shape[1]}")
    shape = (tensor.shape[0], all_tokens[index], sum(units), tensor.shape[3])
    targets = _outputs([tensor], [shape], None if out is None else [out])
    return HeadExchange((tensor,), targets, all_tokens, units, gather=True, replicated=replicated)


def plan_by_copies(transport: Transport, call: Call, heads: HeadExchange, rank: int) -> Plan:
    """The exchange in terms of ``Transport.plan_exchange``: pack what goes to each member, exchange, unpack."""
    index, size = call.ranks.index(rank), len(call.ranks)
    pieces, send_begin, recv_begin = [], 0, 0
    for position, peer in enumerate(call.ranks):
        sent, received = (
            sum(part.numel() * part.element_size() for part in heads.parts(position, outgoing=outgoing))
            for outgoing in (True, False)
        )
        pieces.append(PeerSlice(peer, send_begin, sent, recv_begin, received))
        send_begin, recv_begin = send_begin + sent, recv_begin + received
    # Peers in the order that keeps everybody from sending to the same rank first; the own part last.
    exchange = transport.plan_exchange(call, [*pieces[index + 1 :], *pieces[:index], pieces[index]])

    def run(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        given = replace(heads, sources=tuple(sources), targets=tuple(targets))
        packed = [part.reshape(-1) for position in range(size) for part in given.parts(position, outgoing=True)]
        source = torch.cat(packed)
        target = source.new_empty(recv_begin // source.element_size())
        exchange(source, target)
        begin = 0
        for position in range(size):
            for part in given.parts(position, outgoing=False):
                part.copy_(target[begin : begin + part.numel()].view(part.shape))
                begin += part.numel()

    return run


def _check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError(f"{name} must not be empty")
    first = tensors[0]
    for tensor in tensors:
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head size), got shape {tuple(tensor.shape)}")
        if tensor.shape[:2] != first.shape[:2] or tensor.dtype != first.dtype:
            raise ValueError(f"{name} must have one batch size, number of tokens and dtype")


def _sizes(name: str, sizes: Sequence[int] | None, own: int, group_size: int) -> tuple[int, ...]:
    """Sizes by position; without any, everybody's are like the own."""
    if sizes is None:
        return (own,) * group_size
    if len(sizes) != group_size or min(sizes) < 0:
        raise ValueError(f"{name} must be {group_size} non-negative numbers, got {tuple(sizes)}")
    return tuple(int(size) for size in sizes)


def _splits(name: str, sizes: Sequence[int] | None, whole: int, group_size: int) -> tuple[int, ...]:
    """Sizes by position that ``whole`` is split into; without any, equal ones."""
    if sizes is not None:
        return _sizes(name, sizes, 0, group_size)
    if whole % group_size:
        raise ValueError(f"{whole} {name} do not divide by {group_size} ranks: say how to split them")
    return (whole // group_size,) * group_size


def _outputs(
    tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], out: Sequence[torch.Tensor] | None
) -> tuple[torch.Tensor, ...]:
    if out is None:
        return tuple(tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    for given, tensor, shape in zip(out, tensors, shapes, strict=True):
        if tuple(given.shape) != tuple(shape):
            raise ValueError(f"out has shape {tuple(given.shape)}, expected {tuple(shape)}")
        check_same_dtype(given, tensor)
    return tuple(out)
