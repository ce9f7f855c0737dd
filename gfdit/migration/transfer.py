"""Moves an artifact from one rank to the ranks that lack it, over group-free collectives."""

from __future__ import annotations

import torch

from gfdit.comm import Group, GroupFreeComm
from gfdit.migration.parts import ArtifactParts


class MigrationError(RuntimeError):
    """An artifact could not be copied; edges are in step, since every member took part to the end."""


def send_artifact(comm: GroupFreeComm, ranks: tuple[int, ...], parts: ArtifactParts, header: bytes) -> int:
    """Broadcast ``parts`` from this rank, ``ranks[0]``, to the others; returns the bytes of one copy."""
    group = comm.group(ranks)
    _send_bytes(comm, group, ranks[0], header, failed=False)
    for tensor in parts.tensors.values():
        if tensor.numel():
            comm.broadcast(tensor.contiguous(), ranks[0], group)
    return parts.num_bytes


def send_failure(comm: GroupFreeComm, ranks: tuple[int, ...], message: str) -> None:
    """Take part in the migration only to say that there is nothing to send, and why."""
    _send_bytes(comm, comm.group(ranks), ranks[0], message.encode(), failed=True)


def receive_artifact(comm: GroupFreeComm, ranks: tuple[int, ...], device: torch.device) -> ArtifactParts:
    """The receiving side of :func:`send_artifact`; tensors arrive on ``device``.

    Raises :class:`MigrationError` with the sender's message after :func:`send_failure`.
    """
    group = comm.group(ranks)
    size = torch.empty(2, dtype=torch.int64)
    comm.broadcast(size, ranks[0], group)
    num_bytes, failed = size.tolist()
    header = torch.empty(num_bytes, dtype=torch.uint8)
    comm.broadcast(header, ranks[0], group)
    if failed:
        raise MigrationError(header.numpy().tobytes().decode())
    parts = ArtifactParts.allocate(header.numpy().tobytes(), device)
    for tensor in parts.tensors.values():
        if tensor.numel():
            comm.broadcast(tensor, ranks[0], group)
    return parts


def _send_bytes(comm: GroupFreeComm, group: Group, source: int, data: bytes, *, failed: bool) -> None:
    comm.broadcast(torch.tensor([len(data), int(failed)], dtype=torch.int64), source, group)
    comm.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), source, group)
