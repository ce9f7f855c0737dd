"""From what ranks hold to what a layout needs: the transfers in between (GF-DiT paper, section 5.3).

Every byte that a rank needs and lacks moves exactly once, and nothing else does. The order of the transfers is
part of the plan: every rank runs those that it takes part in, in that order. So the first transfer that is not
done waits for nobody, and there is always one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from gfdit.core.artifacts.views import ArtifactView, Box, FieldView, cells, contains, volume
from gfdit.core.layouts import ExecutionLayout

Ranks = tuple[int, ...]

# Replicated fields up to here go with what is sent anyway: a message costs more than they do.
RIDING_BYTES = 32 * 1024


class Piece(Struct, frozen=True, gc=False):
    """``box``, in global coordinates, of the field at ``index`` of a view."""

    index: int
    box: Box


class Transfer(Struct, frozen=True, gc=False):
    """``source`` sends the same ``pieces`` to all ``destinations``, and the artifact's metadata if ``metadata``.

    ``num_bytes`` counts the pieces once.
    """

    source: int
    destinations: Ranks
    pieces: tuple[Piece, ...] = ()
    metadata: bool = True
    num_bytes: int = 0

    @property
    def ranks(self) -> Ranks:
        return (self.source, *self.destinations)


class TransferPlan(Struct, frozen=True, gc=False):
    """``transfers`` in the order to run them. ``ranks``, sources first, have something to do.

    Some may only have to drop a part of what they hold.
    """

    ranks: Ranks
    transfers: tuple[Transfer, ...]


def plan_transfers(
    view: ArtifactView,
    held: Mapping[int, ExecutionLayout],
    target: ExecutionLayout,
    idle: Collection[int] = (),
) -> TransferPlan:
    """How the ranks of ``target`` get what they need; ``held`` says who has the artifact, and under which layout.

    Of several owners those in ``target`` send, since they are free by the time the artifact is needed; then those
    that are ``idle``; then any. Receivers are divided among them. Raises ``ValueError`` for what nobody holds.
    """
    newcomers = tuple([rank for rank in target.ranks if rank not in held])
    all_of_it = (tuple(sorted(held)), newcomers)  # what is replicated, metadata too
    needs: dict[tuple[Ranks, Ranks], list[Piece]] = {}  # by owners and receivers
    if newcomers:
        needs[all_of_it] = []
    for index, field in enumerate(view.fields):
        if not field.sharded:
            if newcomers and volume(field.whole):
                needs[all_of_it].append(Piece(index, field.whole))
            continue
        for key, boxes in _lacking(field, held, target).items():
            needs.setdefault(key, []).extend([Piece(index, box) for box in _merged(boxes)])
    sharing = _Sharing(view, target.ranks, idle)
    sizes = {key: sharing.num_bytes(pieces) for key, pieces in needs.items()}
    for key in sorted(needs, key=lambda key: (key == all_of_it, -sizes[key], key)):
        owners, receivers = key
        if key == all_of_it and sizes[key] <= RIDING_BYTES:
            receivers = sharing.add_to_others(owners, receivers, needs[key], sizes[key])
        sharing.add(owners, receivers, needs[key], sizes[key], metadata=key == all_of_it)
    transfers = _in_rounds(sharing.transfers())
    sources = {transfer.source for transfer in transfers}
    others = {rank for transfer in transfers for rank in transfer.destinations}
    others.update(rank for rank in target.ranks if rank in held and not view.same_part(rank, held[rank], target))
    return TransferPlan((*sorted(sources), *sorted(others - sources)), transfers)


class _Sharing:
    """Divides receivers among owners, the least loaded first, and gathers what goes the same way."""

    def __init__(self, view: ArtifactView, inside: Ranks, idle: Collection[int]) -> None:
        self._view = view
        self._inside = frozenset(inside)
        self._idle = idle
        self._load_bytes: dict[int, int] = {}
        self._pieces: dict[tuple[int, Ranks], list[Piece]] = {}
        self._metadata: set[tuple[int, Ranks]] = set()

    def num_bytes(self, pieces: Sequence[Piece]) -> int:
        return sum([self._view.fields[piece.index].num_bytes(piece.box) for piece in pieces])

    def add_to_others(self, owners: Ranks, receivers: Ranks, pieces: list[Piece], num_bytes: int) -> Ranks:
        """Let ``pieces`` and metadata ride with what goes to ``receivers`` anyway; returns those left without."""
        left = set(receivers)
        for source, rest in sorted(self._pieces, key=lambda way: (-len(way[1]), way)):
            if source in owners and left.issuperset(rest):
                left.difference_update(rest)
                self._put((source, rest), pieces, num_bytes, metadata=True)
        return tuple([rank for rank in receivers if rank in left])

    def add(self, owners: Ranks, receivers: Ranks, pieces: list[Piece], num_bytes: int, *, metadata: bool) -> None:
        preferred = [rank for rank in owners if rank in self._inside]
        preferred = preferred or [rank for rank in owners if rank in self._idle] or list(owners)
        if not preferred:
            raise ValueError(f"ranks {receivers} need what no rank holds")
        preferred.sort(key=lambda rank: (self._load_bytes.get(rank, 0), rank))
        num_sources = min(len(preferred), len(receivers))
        for number, source in enumerate(preferred[:num_sources]):
            self._put((source, receivers[number::num_sources]), pieces, num_bytes, metadata=metadata)

    def _put(self, way: tuple[int, Ranks], pieces: list[Piece], num_bytes: int, *, metadata: bool) -> None:
        source, receivers = way
        self._pieces.setdefault(way, []).extend(pieces)
        self._load_bytes[source] = self._load_bytes.get(source, 0) + num_bytes * len(receivers)
        if metadata:
            self._metadata.add(way)

    def transfers(self) -> list[Transfer]:
        made = []
        for way, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: (piece.index, piece.box))
            made.append(Transfer(*way, tuple(pieces), way in self._metadata, self.num_bytes(pieces)))
        return made


def _lacking(
    field: FieldView, held: Mapping[int, ExecutionLayout], target: ExecutionLayout
) -> dict[tuple[Ranks, Ranks], list[Box]]:
    """What ranks of ``target`` lack, by its owners and those ranks."""
    owned = {rank: field.box(layout, rank) for rank, layout in sorted(held.items())}
    needed = {rank: field.box(target, rank) for rank in target.ranks}
    found: dict[tuple[Ranks, Ranks], list[Box]] = {}
    for cell in cells([*owned.values(), *needed.values()]):
        owners = tuple([rank for rank, box in owned.items() if contains(box, cell)])
        receivers = tuple([rank for rank, box in needed.items() if contains(box, cell) and rank not in owners])
        if receivers:
            found.setdefault((owners, receivers), []).append(cell)
    return found


def _merged(boxes: list[Box]) -> list[Box]:
    """The same elements in fewer boxes, where neighbours make one."""
    for dim in range(len(boxes[0])):
        joined: list[Box] = []
        for box in sorted(boxes, key=lambda box: (box[:dim], box[dim + 1 :], box[dim])):
            last = joined[-1] if joined else None
            if last and last[dim][1] == box[dim][0] and _others(last, dim) == _others(box, dim):
                joined[-1] = (*box[:dim], (last[dim][0], box[dim][1]), *box[dim + 1 :])
            else:
                joined.append(box)
        boxes = joined
    return boxes


def _others(box: Box, dim: int) -> Box:
    return box[:dim] + box[dim + 1 :]


def _in_rounds(transfers: list[Transfer]) -> tuple[Transfer, ...]:
    """Largest first, but those that share no rank next to each other: they run at the same time."""
    waiting = sorted(transfers, key=lambda transfer: (-transfer.num_bytes, transfer.ranks))
    ordered: list[Transfer] = []
    while waiting:
        busy: set[int] = set()
        later = []
        for transfer in waiting:
            if busy.isdisjoint(transfer.ranks):
                ordered.append(transfer)
                busy.update(transfer.ranks)
            else:
                later.append(transfer)
        waiting = later
    return tuple(ordered)
