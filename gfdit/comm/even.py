"""Exchanges whose parts are all of one size, at offsets that are multiples of the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gfdit.comm.heap import PeerSlice


class EvenParts(NamedTuple):
    """Position ``i`` gets bytes at ``i * send_stride`` of the input and fills those at ``i * recv_stride``."""

    send_stride: int
    recv_stride: int
    num_bytes: int


def even_parts(ranks: tuple[int, ...], parts: Mapping[int, PeerSlice]) -> EvenParts | None:
    """The common size and the strides of an exchange among ``ranks``; None if there are none.

    A rank without a part keeps nothing for itself.
    """
    pieces = [(position, parts[rank]) for position, rank in enumerate(ranks) if rank in parts]
    sizes = {size for _, piece in pieces for size in (piece.send_bytes, piece.recv_bytes)}
    if len(sizes) > 1:
        return None
    num_bytes = sizes.pop() if sizes else 0
    if num_bytes == 0:
        return EvenParts(0, 0, 0)
    if len(pieces) < len(ranks):
        return None
    send_stride = _stride([piece.send_offset for _, piece in pieces])
    recv_stride = _stride([piece.recv_offset for _, piece in pieces])
    for position, piece in pieces:
        if (piece.send_offset, piece.recv_offset) != (position * send_stride, position * recv_stride):
            return None
    return EvenParts(send_stride, recv_stride, num_bytes)


def _stride(offsets: list[int]) -> int:
    return offsets[1] - offsets[0] if len(offsets) > 1 else 0
