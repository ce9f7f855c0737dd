"""Byte ranges of a collective: who gets which part of the input and fills which part of the output."""

from __future__ import annotations

from collections.abc import Sequence

from gfdit.comm.group import Group
from gfdit.comm.heap import PeerSlice


def consecutive_slices(group: Group, send_bytes: Sequence[int], recv_bytes: Sequence[int]) -> list[PeerSlice]:
    """Parts laid out one after another by group position, in input and output alike.

    ``send_bytes`` and ``recv_bytes`` are indexed by position. The result starts with the peers in
    ``group.peers`` order and ends with the member itself.
    """
    by_rank = {}
    send_offset = recv_offset = 0
    for rank, send, recv in zip(group.ranks, send_bytes, recv_bytes, strict=True):
        by_rank[rank] = PeerSlice(rank, send_offset, send, recv_offset, recv)
        send_offset, recv_offset = send_offset + send, recv_offset + recv
    return [*(by_rank[peer] for peer in group.peers), by_rank[group.rank]]
