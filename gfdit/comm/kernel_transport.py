"""Agreement and data movement by kernels: on a GPU, or interpreted over memory that rank processes share.

The counters live in device memory, so an operation is one launch that the host does not wait for and that a
captured graph may replay. A failure shows in the lane's status cell. The interpreter runs a launch to its end, so
there the operation itself raises; on a GPU the next operation or ``check`` does.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from gfdit.comm.agreement import CREDIT_DIGEST, NUM_SLOTS, EdgeAgreement, edge_digest, make_token
from gfdit.comm.choice import Choice, Path, Situation
from gfdit.comm.even import EvenParts, even_parts
from gfdit.comm.exchange import Exchange
from gfdit.comm.exchange_paths import PATHS, is_hopper
from gfdit.comm.heads import HeadExchange, exchange_by_copies
from gfdit.comm.heap import Call, KernelHeap, PeerSlice
from gfdit.comm.heap_tensors import heap_addresses
from gfdit.comm.kernel_failures import KernelFailures
from gfdit.comm.kernel_heads import edge_bytes, fits, is_even, launch_exchange, table_rows
from gfdit.comm.kernel_state import LaneState, site_of
from gfdit.comm.layout import ABORT_WORD, ARMED_WORD, WORD_BYTES
from gfdit.comm.one_way_paths import ONE_WAY_PATHS, OneWay
from gfdit.comm.selector import Selector
from gfdit.kernels import edges, low_latency_all_reduce
from gfdit.kernels.launch import launcher
from gfdit.kernels.members import MAX_PACKED, ROW_WORDS, Members
from gfdit.kernels.variants import all_variants

_HEADS = Choice(Path.PUSH, chunk_bytes=0, num_programs=1)
# There is one table per group and sizes of its parts. The last ones used are kept: a server meets ever new sizes.
MAX_TABLES = 1024


class KernelTransport:
    """One lane of one rank. See ``Transport``.

    Operations are ordered by the stream they are launched on: use a lane from one stream at a time. After any
    failure the edges of that operation refuse further work (CommAborted) until ``reset``.
    """

    def __init__(self, heap: KernelHeap, lane: str, timeout_s: float) -> None:
        self._rank = heap.rank
        self._lane = lane
        self._lane_index = heap.lanes.index(lane)
        self._layout = heap.layout
        self._heap = heap
        self._state = LaneState(heap, self._lane_index, timeout_s)
        obstacles = {path: kind.obstacle for path, kind in PATHS.items()}
        self.selector = Selector(site_of(heap), obstacles, heap.selector_table)
        self._no_table = torch.zeros(1, dtype=torch.int64, device=heap.device)
        self._tables: OrderedDict[tuple[tuple[int, ...], ...], torch.Tensor] = OrderedDict()
        self._captured: dict[int, torch.Tensor] = {}  # tables that graphs read when they are replayed, by address
        self._heap_addresses = heap_addresses(heap)
        self._busy = threading.Lock()
        self._checking = threading.Lock()  # a lane and the monitor of its device may both check
        self._failures = KernelFailures(self._rank, lane, self._state, timeout_s)
        self._side_stream = torch.cuda.Stream(heap.device) if self._state.on_gpu else None
        # Of an agreement, the host knows the generation.
        self._agreements = {peer: EdgeAgreement() for peer in range(heap.world_size) if peer != self._rank}

    def exchange(self, call: Call, source: torch.Tensor, target: torch.Tensor, peers: Sequence[PeerSlice]) -> None:
        parts = {piece.rank: piece for piece in peers}
        with self._operation(call, [rank for rank in call.ranks if rank != self._rank]):
            even = even_parts(call.ranks, parts) if len(call.ranks) <= MAX_PACKED else None
            # Of the storage: a tensor without elements has no address of its own.
            in_heap = [tensor.untyped_storage().data_ptr() in self._heap_addresses for tensor in (source, target)]
            choice = self.selector.choose(Situation(call.operation, len(call.ranks), call.num_bytes, *in_heap))
            exchange = Exchange(
                call=call,
                heap=self._heap,
                state=self._state,
                lane_index=self._lane_index,
                members=self._members(call, choice, even, parts),
                source=source,
                target=target,
                even=even,
                parts=parts,
                alignment=_combined(
                    even or [x for piece in peers for x in (piece.send_offset, piece.recv_offset)]
                ),
                choice=choice,
            )
            PATHS[choice.path].run(exchange)

    def exchange_heads(self, call: Call, heads: HeadExchange) -> None:
        if not fits(heads, self._layout.slot_bytes):
            exchange_by_copies(self, call, heads, self._rank)
            return
        with self._operation(call, [rank for rank in call.ranks if rank != self._rank]):
            index = call.ranks.index(self._rank)
            digests = []
            for position in range(len(call.ranks)):
                # Both ends of an edge need the same digest: the direction from the smaller position comes first.
                ends = sorted((index, position))
                digests.append(_digest(call, _HEADS, edge_bytes(heads, *ends), edge_bytes(heads, *reversed(ends))))
            packed = is_even(heads) and len(call.ranks) <= MAX_PACKED
            table = self._no_table if packed else self._kept_table(table_rows(heads, call.ranks, digests))
            launch_exchange(self._group(call, digests[0], table, packed), heads)

    def all_reduce(self, call: Call, flat: torch.Tensor) -> bool:
        choice = self.selector.choose(Situation(call.operation, len(call.ranks), flat.nbytes))
        packed = len(call.ranks) <= MAX_PACKED
        if choice.path is not Path.LOW_LATENCY or flat.dtype not in low_latency_all_reduce.DTYPES or not packed:
            return False
        with self._operation(call, [rank for rank in call.ranks if rank != self._rank]):
            members = self._group(call, _digest(call, choice, flat.nbytes, flat.nbytes), self._no_table, packed)
            low_latency_all_reduce.run(members, flat, choice.num_programs)
        return True

    def push(self, call: Call, source: torch.Tensor, ranks: Sequence[int]) -> None:
        with self._operation(call, ranks):
            operation = self._one_way(call, source)
            ONE_WAY_PATHS[operation.choice.path].push(operation)

    def pull(self, call: Call, target: torch.Tensor, rank: int) -> None:
        with self._operation(call, [rank]):
            operation = self._one_way(call, target)
            ONE_WAY_PATHS[operation.choice.path].pull(operation)

    def _one_way(self, call: Call, tensor: torch.Tensor) -> OneWay:
        """Ready to move all bytes of ``tensor`` from the first of the call's ranks to others."""
        size = tensor.nbytes
        choice = self.selector.choose(Situation(call.operation, len(call.ranks), size))
        packed = len(call.ranks) <= MAX_PACKED
        table = self._no_table if packed else self._kept_table([_row(rank) for rank in call.ranks])
        members = self._group(call, _digest(call, choice, size, 0), table, packed)
        return OneWay(members, tensor.data_ptr(), size, choice)

    @property
    def num_failures(self) -> int:
        return self._failures.num_taken

    def abort(self, ranks: Iterable[int]) -> None:
        with self._aside():
            for rank in ranks:
                mark = self._agreements[rank].generation << 1 | 1
                for owner, peer in ((self._rank, rank), (rank, self._rank)):
                    self._line(owner, peer)[ABORT_WORD] = mark

    def reset(self, ranks: Iterable[int], generation: int | None = None) -> None:
        ranks = list(ranks)
        self._enter()
        try:
            generations = [self._agreements[rank].next_generation(generation) for rank in ranks]
            self._synchronize()
            # Only a launch that was cut short, which the interpreter's can be, leaves anything here.
            self._state.state[: edges.STATE_WORDS] = 0
            for rank, new in zip(ranks, generations, strict=True):
                self._agreements[rank].reset(new)
                edge = self._state.edge(rank)
                edge.zero_()
                edge[edges.EDGE_GENERATION.value] = new
                self._low_latency_slots(rank).zero_()
                # Only now may the peer's kernels store into them.
                self._line(rank, self._rank)[ARMED_WORD] = make_token(CREDIT_DIGEST, new, 0)
                self._failures.forget(rank)
            self._synchronize()
        finally:
            self._busy.release()

    def check(self) -> None:
        """Raise what the kernels launched so far have run into; waits for nothing unless it raises."""
        with self._checking:
            if self._failures.reported():
                self._synchronize()
                raise self._failures.take()

    def warm_up(self) -> None:
        variants = list(all_variants(self._heap.world_size, self._state.on_gpu, is_hopper(site_of(self._heap))))
        # Ranks that share a disk cache begin with different ones.
        first = self._rank * len(variants) // self._heap.world_size
        launcher.warm_up([*variants[first:], *variants[:first]])
        # What an abort needs of torch: loading it then would wait for the kernels that are to be aborted.
        with self._aside():
            self._no_table[0] = 0

    @contextmanager
    def _operation(self, call: Call, peers: Sequence[int]) -> Iterator[None]:
        self._enter()
        try:
            self.check()
            self._failures.refuse_broken(call, peers)
            try:
                yield
            except BaseException as error:  # the peers have issued it, or will
                self._failures.mark(peers, type(error).__name__)
                raise
            if not self._state.on_gpu:
                self.check()
        finally:
            self._busy.release()

    def _enter(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise ValueError(f"lane {self._lane!r} of rank {self._rank} is in use by another thread")

    def _members(
        self, call: Call, choice: Choice, even: EvenParts | None, parts: Mapping[int, PeerSlice]
    ) -> Members:
        if even is None:
            digest = _digest(call, choice, call.num_bytes or 0, call.num_bytes or 0)
            return self._group(call, digest, self._table(call, choice, parts), packed=False)
        return self._group(
            call, _digest(call, choice, even.num_bytes, even.num_bytes), self._no_table, packed=True
        )

    def _group(self, call: Call, digest: int, table: torch.Tensor, packed: bool) -> Members:
        """For one launch: its label is new."""
        index, label = call.ranks.index(self._rank), self._failures.label(call)
        return Members(self._state.constants, call.ranks, index, digest, label, table, packed, self._state.on_gpu)

    def _table(self, call: Call, choice: Choice, parts: Mapping[int, PeerSlice]) -> torch.Tensor:
        """Byte ranges by position, in device memory; written by the first operation that has them, then kept."""
        rows = []
        for rank in call.ranks:
            piece = parts.get(rank, PeerSlice(rank, 0, 0, 0, 0))
            forth, back = piece.send_bytes, piece.recv_bytes
            # One digest for both directions of an edge: that from the smaller rank comes first.
            digest = _digest(call, choice, *((forth, back) if self._rank < rank else (back, forth)))
            rows.append(_row(*piece, digest))
        return self._kept_table(rows)

    def _kept_table(self, rows: list[tuple[int, ...]]) -> torch.Tensor:
        key = tuple(rows)
        table = self._tables.pop(key, None)
        if table is None:
            table = torch.tensor(rows, dtype=torch.int64).to(self._heap.device)
        self._tables[key] = table
        if self._state.on_gpu and torch.cuda.is_current_stream_capturing():
            self._captured[table.data_ptr()] = table
        if len(self._tables) > MAX_TABLES:
            # What still reads it was launched on this stream before whatever gets its memory.
            self._tables.popitem(last=False)
        return table

    def _aside(self) -> AbstractContextManager[object]:
        """A stream of its own: the lane's may be waiting for what is about to be aborted."""
        return torch.cuda.stream(self._side_stream) if self._side_stream else nullcontext()

    def _synchronize(self) -> None:
        if self._state.on_gpu:
            torch.cuda.current_stream(self._heap.device).synchronize()

    def _line(self, owner: int, peer: int) -> torch.Tensor:
        """The words in ``owner``'s segment that ``peer`` writes."""
        begin = self._layout.line_offset(self._lane_index, owner, peer)
        return self._heap.segment(owner)[begin : begin + 16 * WORD_BYTES].view(torch.int64)

    def _low_latency_slots(self, peer: int) -> torch.Tensor:
        """Those in this rank's segment that ``peer`` writes."""
        size = NUM_SLOTS * self._layout.low_latency_slot_bytes
        begin = self._layout.low_latency_offset(self._lane_index) + (peer - (peer > self._rank)) * size
        return self._heap.segment(self._rank)[begin : begin + size]


def _combined(offsets: Iterable[int]) -> int:
    """All offsets combined with "or": as aligned as the least aligned of them."""
    combined = 0
    for offset in offsets:
        combined |= offset
    return combined


def _row(*words: int) -> tuple[int, ...]:
    return (*words, *(0,) * (ROW_WORDS - len(words)))


def _digest(call: Call, choice: Choice, forth_bytes: int, back_bytes: int) -> int:
    how = f"{choice.path.protocol} {choice.chunk_bytes} {choice.num_programs} {back_bytes}".encode()
    return edge_digest(call.seed ^ zlib.crc32(how), call.operation, forth_bytes)
