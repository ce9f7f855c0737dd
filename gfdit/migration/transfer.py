"""Moves an artifact from one rank to the ranks that lack it, over group-free collectives.

Messages, all of them broadcasts of bytes on the communicator's device: the first ``FIRST_BYTES`` of a preamble,
what is left of it if there is more, and one per large tensor. The preamble says how long it is, and holds the
header and the small tensors. So a small artifact takes one message, and a typical one two or three.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import torch

from gfdit.comm import Group, GroupFreeComm
from gfdit.migration.parts import ArtifactParts

FIRST_BYTES = 16 * 1024
# Tensors up to here travel in the preamble: a copy costs less than a message.
SMALL_BYTES = 32 * 1024
# Of what is in a preamble: as aligned as any dtype needs.
_ALIGNMENT = 16
# Bytes of the preamble, bytes of the header, whether there is nothing else and the header says why.
_SIZES = struct.Struct("<qqq")


class MigrationError(RuntimeError):
    """An artifact could not be copied; edges are in step, since every member took part to the end."""


def send_artifact(comm: GroupFreeComm, ranks: tuple[int, ...], parts: ArtifactParts, header: bytes) -> int:
    """Broadcast ``parts`` from this rank, ``ranks[0]``, to the others; returns the bytes of one copy.

    ``header`` is ``parts.header()``. On a GPU the copies are in flight on the current stream when it returns.
    """
    group = comm.group(ranks)
    tensors = [tensor.to(comm.device).contiguous() for tensor in parts.tensors.values()]
    _send_preamble(comm, group, header, [tensor for tensor in tensors if _is_small(tensor)], failed=False)
    for tensor in tensors:
        if not _is_small(tensor):
            comm.broadcast(tensor, ranks[0], group)
    return parts.num_bytes


def send_failure(comm: GroupFreeComm, ranks: tuple[int, ...], message: str) -> None:
    """Take part in the migration only to say that there is nothing to send, and why."""
    _send_preamble(comm, comm.group(ranks), message.encode(), [], failed=True)


def receive_artifact(comm: GroupFreeComm, ranks: tuple[int, ...], device: torch.device) -> ArtifactParts:
    """The receiving side of :func:`send_artifact`; returns when everything has arrived.

    Tensors come to ``device``, those that the sender keeps on the host to the host. Raises
    :class:`MigrationError` with the sender's message after :func:`send_failure`.
    """
    group = comm.group(ranks)
    header, failed, preamble = _receive_preamble(comm, ranks[0], group)
    if failed:
        raise MigrationError(header.decode())
    parts = ArtifactParts.allocate(header, device)
    begin = _aligned(_SIZES.size + len(header))
    for name, tensor in parts.tensors.items():
        if _is_small(tensor):
            tensor.copy_(_view(preamble[begin : begin + tensor.nbytes], like=tensor))
            begin += _aligned(tensor.nbytes)
        else:
            arriving = tensor.to(comm.device)  # itself, unless it belongs elsewhere
            comm.broadcast(arriving, ranks[0], group)
            parts.tensors[name] = arriving.to(tensor.device)
    comm.synchronize()
    return parts


def _send_preamble(
    comm: GroupFreeComm, group: Group, header: bytes, tensors: Sequence[torch.Tensor], *, failed: bool
) -> None:
    """``tensors`` are contiguous, on the communicator's device."""
    num_bytes = _aligned(_SIZES.size + len(header)) + sum(_aligned(tensor.nbytes) for tensor in tensors)
    preamble = torch.zeros(max(num_bytes, FIRST_BYTES), dtype=torch.uint8, device=comm.device)
    head = _SIZES.pack(num_bytes, len(header), failed) + header
    pieces: Iterable[torch.Tensor] = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors]
    begin = 0
    for piece in pieces:
        preamble[begin : begin + piece.nbytes].copy_(piece.view(-1).view(torch.uint8))
        begin += _aligned(piece.nbytes)
    comm.broadcast(preamble[:FIRST_BYTES], comm.rank, group)
    if num_bytes > FIRST_BYTES:
        comm.broadcast(preamble[FIRST_BYTES:], comm.rank, group)


def _receive_preamble(comm: GroupFreeComm, source: int, group: Group) -> tuple[bytes, bool, torch.Tensor]:
    """Header, whether it tells of a failure, and the whole preamble on the communicator's device."""
    preamble = torch.empty(FIRST_BYTES, dtype=torch.uint8, device=comm.device)
    comm.broadcast(preamble, source, group)
    first = _bytes_of(comm, preamble)
    num_bytes, header_bytes, failed = _SIZES.unpack_from(first)
    if num_bytes > FIRST_BYTES:
        rest = torch.empty(num_bytes - FIRST_BYTES, dtype=torch.uint8, device=comm.device)
        comm.broadcast(rest, source, group)
        preamble = torch.cat([preamble, rest])
    end = _SIZES.size + header_bytes
    head = first if end <= FIRST_BYTES else _bytes_of(comm, preamble[:end])
    return head[_SIZES.size : end], bool(failed), preamble


def _bytes_of(comm: GroupFreeComm, tensor: torch.Tensor) -> bytes:
    """The bytes that have arrived in ``tensor``. Raises CommError if they have not: nothing must read junk."""
    host = tensor.cpu()
    comm.check()
    return host.numpy().tobytes()


def _view(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """uint8 ``data`` with the dtype and shape of ``like``."""
    return data.view(like.dtype).view(like.shape)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= SMALL_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
