"""Runs one rank's side of a migration over group-free collectives.

The command says everything that a receiver has to know, so nobody asks or waits for an answer. A transfer is a
broadcast of bytes, on the communicator's device, for each large piece, after one that holds the small pieces, the
metadata and whether the sender could send at all: if it could not, zeros take the place of what is missing, so
that edges stay in step whatever happens.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gfdit.comm import Group, GroupFreeComm
from gfdit.core.artifacts.transfers import Piece, Transfer
from gfdit.core.artifacts.views import ArtifactView, Box, FieldView, inside, intersection
from gfdit.core.commands import Migrate
from gfdit.core.layouts import ExecutionLayout
from gfdit.migration.parts import ArtifactParts
from gfdit.migration.staging import Staging

# Pieces up to here travel together: a copy costs less than a message.
SMALL_BYTES = 128 * 1024
# 1 if the sender failed, 2 if it lacks the artifact, and the bytes of its metadata or of the text that says why.
_STATUS = struct.Struct("<qq")
# Room at the start of a first message; longer metadata goes on in a second one, longer texts are cut.
METADATA_ROOM = 16 * 1024 - _STATUS.size
_TEXT_ROOM = 512 - _STATUS.size
# As aligned as any dtype needs.
_ALIGNMENT = 16


class MigrationError(RuntimeError):
    """An artifact could not be brought here; edges are in step, since every rank took part to the end.

    ``sender``: the rank that could not send its part. ``missing``: it did not have it.
    """

    def __init__(self, message: str, sender: int, *, missing: bool = False) -> None:
        super().__init__(message)
        self.sender = sender
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Arrived:
    """``parts`` of an artifact under the layout it was brought to; ``num_bytes`` of them came from other ranks."""

    parts: ArtifactParts
    num_bytes: int


def migrate(
    comm: GroupFreeComm,
    command: Migrate,
    export: Callable[[], ArtifactParts],
    device: torch.device,
    staging: Staging | None = None,
) -> Arrived | None:
    """Take part in ``command``; None where this rank is not in its target.

    ``export`` gives what this rank holds; its tensors stay as they are. New tensors are on ``device``, those that
    the view has on the host there. ``staging``: memory on the communicator's device for all that is new there, by
    default allocated. Returns when everything has arrived and may be overwritten at its source.
    Raises :class:`MigrationError` if a rank that sends to this one, or this one, could not export.
    """
    layout = dict(command.held).get(comm.rank)
    own, failure, missing = None, "", False
    if layout is not None:
        try:
            own = _checked(export(), command.view, layout, comm.rank)
        except Exception as error:
            failure = f"rank {comm.rank} cannot send {command.artifact}: {type(error).__name__}: {error}"
            missing = isinstance(error, (KeyError, _OtherPartError))
    staging = staging or Staging(comm.device)
    sender = _Sender(comm, command.view, layout, own, failure, missing, staging)
    receiver = _Receiver.prepare(comm, command, layout, own, device, staging)
    for transfer in command.transfers:
        if comm.rank == transfer.source:
            sender.send(transfer)
        elif comm.rank in transfer.destinations:
            assert receiver is not None, f"rank {comm.rank} receives but is not in {command.target}"
            receiver.receive(transfer)
    comm.synchronize()
    if failure:
        raise MigrationError(failure, comm.rank, missing=missing)
    return receiver.arrived() if receiver is not None else None


class _OtherPartError(ValueError):
    """What a rank holds is what it held before a copy that broke: the part it should have got is lost."""


def _checked(parts: ArtifactParts, view: ArtifactView, layout: ExecutionLayout, rank: int) -> ArtifactParts:
    if (names := [spec.name for spec in view.fields]) != list(parts.tensors):
        raise ValueError(f"it has the fields {', '.join(parts.tensors)}, expected: {', '.join(names)}")
    for spec in view.fields:
        if spec.sharded and (parts.layout is None or spec.box(parts.layout, rank) != spec.box(layout, rank)):
            raise _OtherPartError(f"field {spec.name} is the part under {parts.layout}, not that under {layout}")
        shape, expected = tuple(parts.tensors[spec.name].shape), _extents(spec.box(layout, rank))
        if shape != expected:
            raise ValueError(f"field {spec.name} has shape {shape}, under {layout} it is {expected}")
    return parts


@dataclass(frozen=True, slots=True)
class _Message:
    """The first message of a transfer: status, room for metadata, and the small pieces by their offset."""

    room_bytes: int
    num_bytes: int
    small: tuple[tuple[int, Piece], ...]
    large: tuple[Piece, ...]

    @classmethod
    def of(cls, transfer: Transfer, view: ArtifactView) -> _Message:
        room_bytes = METADATA_ROOM if transfer.metadata else _TEXT_ROOM
        num_bytes = _STATUS.size + room_bytes
        small, large = [], []
        for piece in transfer.pieces:
            size = view.fields[piece.index].num_bytes(piece.box)
            if size > SMALL_BYTES:
                large.append(piece)
            else:
                small.append((num_bytes, piece))
                num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(room_bytes, num_bytes, tuple(small), tuple(large))


@dataclass(frozen=True, slots=True)
class _Status:
    """What a first message says: ``text``, metadata or a reason, as far as it fits there, of ``num_bytes``."""

    failed: int
    num_bytes: int
    text: bytes

    @classmethod
    def of(cls, first: torch.Tensor) -> _Status:
        data = first.cpu().numpy().tobytes()
        failed, num_bytes = _STATUS.unpack_from(data)
        return cls(failed, num_bytes, data[_STATUS.size : _STATUS.size + num_bytes])


@dataclass(frozen=True, slots=True)
class _Sender:
    comm: GroupFreeComm
    view: ArtifactView
    layout: ExecutionLayout | None
    own: ArtifactParts | None
    failure: str
    missing: bool
    staging: Staging

    def send(self, transfer: Transfer) -> None:
        group = self.comm.group(transfer.ranks)
        message = _Message.of(transfer, self.view)
        text = self.failure.encode()[: message.room_bytes]
        if self.own is not None:
            text = self.own.metadata if transfer.metadata else b""
        first = torch.zeros(message.num_bytes, dtype=torch.uint8)
        _put(first, 0, _STATUS.pack(bool(self.failure) + self.missing, len(text)))
        _put(first, _STATUS.size, text[: message.room_bytes])
        first = self._on_device(first)
        for offset, piece in message.small:
            data = _bytes_of(self._tensor(piece))
            first[offset : offset + data.nbytes].copy_(data)
        self._broadcast(first, group)
        if rest := text[message.room_bytes :]:
            self._broadcast(self._on_device(torch.frombuffer(bytearray(rest), dtype=torch.uint8)), group)
        for piece in message.large:
            self._broadcast(self._tensor(piece), group)

    def _tensor(self, piece: Piece) -> torch.Tensor:
        spec = self.view.fields[piece.index]
        if self.own is None or self.layout is None:
            return self.staging.empty(_extents(piece.box), _dtype(spec)).zero_()
        held = spec.box(self.layout, self.comm.rank)
        return self._on_device(self.own.tensors[spec.name][inside(held, piece.box)])

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous, on the communicator's device."""
        if tensor.device == self.comm.device and tensor.is_contiguous():
            return tensor
        return self.staging.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _broadcast(self, tensor: torch.Tensor, group: Group) -> None:
        self.comm.broadcast(tensor, self.comm.rank, group)


@dataclass(slots=True)
class _Receiver:
    """Puts together what this rank holds under ``target``."""

    comm: GroupFreeComm
    view: ArtifactView
    target: ExecutionLayout
    parts: ArtifactParts
    staging: Staging
    num_bytes: int = 0
    _first: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # by sender

    @classmethod
    def prepare(
        cls,
        comm: GroupFreeComm,
        command: Migrate,
        layout: ExecutionLayout | None,
        own: ArtifactParts | None,
        device: torch.device,
        staging: Staging,
    ) -> _Receiver | None:
        """Starts with what this rank has already. None where it is not in the target."""
        view, target = command.view, command.target
        if comm.rank not in target.ranks:
            return None
        parts = ArtifactParts(own.metadata if own is not None else b"", layout=target)
        for spec in view.fields:
            needed = spec.box(target, comm.rank)
            if own is not None and layout is not None:
                held = spec.box(layout, comm.rank)
                parts.tensors[spec.name] = own.tensors[spec.name]
                if held == needed:
                    continue
            place = torch.device("cpu") if spec.on_host else device
            if place == staging.device:
                tensor = staging.empty(_extents(needed), _dtype(spec))
            else:
                tensor = torch.empty(_extents(needed), dtype=_dtype(spec), device=place)
            if own is not None and layout is not None and (common := intersection(held, needed)) is not None:
                tensor[inside(needed, common)] = own.tensors[spec.name][inside(held, common)]
            parts.tensors[spec.name] = tensor
        return cls(comm, view, target, parts, staging)

    def receive(self, transfer: Transfer) -> None:
        group = self.comm.group(transfer.ranks)
        message = _Message.of(transfer, self.view)
        first = self.staging.empty((message.num_bytes,), torch.uint8)
        self.comm.broadcast(first, transfer.source, group)
        self._first.append((transfer.source, first[: _STATUS.size + message.room_bytes]))
        if transfer.metadata:
            self._receive_metadata(message, transfer.source, group)
        for offset, piece in message.small:
            region = self._region(piece)
            region.copy_(first[offset : offset + region.nbytes].view(region.dtype).view(region.shape))
        for piece in message.large:
            region = self._region(piece)
            if region.is_contiguous() and region.device == self.comm.device:
                self.comm.broadcast(region, transfer.source, group)
            else:
                arriving = self.staging.empty(region.shape, region.dtype)
                self.comm.broadcast(arriving, transfer.source, group)
                region.copy_(arriving)
        self.num_bytes += transfer.num_bytes + len(self.parts.metadata) * transfer.metadata

    def arrived(self) -> Arrived:
        """Everything has come. Raises :class:`MigrationError` with the text of a sender that failed."""
        for sender, first in self._first:
            status = _Status.of(first)
            if status.failed:
                raise MigrationError(status.text.decode(errors="replace"), sender, missing=status.failed == 2)
        return Arrived(self.parts, self.num_bytes)

    def _receive_metadata(self, message: _Message, source: int, group: Group) -> None:
        host = self._first[-1][1].cpu()
        self.comm.check()  # if nothing has arrived, nothing must read junk
        status = _Status.of(host)
        metadata = status.text
        if not status.failed and (rest_bytes := status.num_bytes - len(metadata)):
            rest = self.staging.empty((rest_bytes,), torch.uint8)
            self.comm.broadcast(rest, source, group)
            host = rest.cpu()
            self.comm.check()
            metadata += host.numpy().tobytes()
        self.parts.metadata = metadata

    def _region(self, piece: Piece) -> torch.Tensor:
        spec = self.view.fields[piece.index]
        needed = spec.box(self.target, self.comm.rank)
        return self.parts.tensors[spec.name][inside(needed, piece.box)]


def _put(tensor: torch.Tensor, offset: int, data: bytes) -> None:
    if data:
        tensor[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _dtype(spec: FieldView) -> torch.dtype:
    return getattr(torch, spec.dtype)


def _extents(box: Box) -> tuple[int, ...]:
    return tuple([end - begin for begin, end in box])
