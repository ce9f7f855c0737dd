"""Agreement and data movement by kernels: on a GPU, or interpreted over memory that rank processes share.

The counters live in device memory, so an operation is one launch that the host does not wait for and that a
captured graph may replay. A failure shows in the lane's status cell. The interpreter runs a launch to its end, so
there the operation itself raises; on a GPU the next operation or ``check`` does.

What an operation does with the same group, shapes, strides and dtypes is prepared once (``Plan``): choice, digest,
packed arguments, compiled kernel. What is left for a launch is a label, the addresses and a look at the status.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gfdit.comm.agreement import CREDIT_DIGEST, NUM_SLOTS, EdgeAgreement, edge_digest, make_token
from gfdit.comm.choice import Choice, Path, Situation
from gfdit.comm.copy_engine import copy_heads
from gfdit.comm.cuda_setup import new_stream
from gfdit.comm.even import EvenParts, even_parts
from gfdit.comm.exchange import Exchange
from gfdit.comm.exchange_paths import PATHS, Run, is_hopper
from gfdit.comm.heads import HeadExchange, plan_by_copies
from gfdit.comm.heap import Call, KernelHeap, PeerSlice, Plan
from gfdit.comm.heap_tensors import heap_addresses, segment_addresses
from gfdit.comm.kernel_failures import KernelFailures
from gfdit.comm.kernel_heads import (
    edge_bytes,
    fit_places,
    fits,
    is_even,
    largest_edge_bytes,
    plan_direct,
    plan_exchange,
    table_rows,
)
from gfdit.comm.kernel_state import LaneState, site_of
from gfdit.comm.layout import ABORT_WORD, ARMED_WORD, WORD_BYTES
from gfdit.comm.one_way_paths import ONE_WAY_PATHS
from gfdit.comm.places import Places
from gfdit.comm.selector import Selector
from gfdit.kernels import edges, low_latency_all_reduce
from gfdit.kernels.launch import combined, launcher
from gfdit.kernels.members import MAX_PACKED, ROW_WORDS, Members
from gfdit.kernels.variants import all_variants


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
        self._captured: dict[int, torch.Tensor] = {}  # tables that graphs read when they are replayed, by address
        self._heap_addresses = heap_addresses(heap)
        self.places = Places(heap) if self._lane_index == 0 and heap.layout.place_bytes else None
        self._busy = threading.Lock()
        self._checking = threading.Lock()  # a lane and the monitor of its device may both check
        self._failures = KernelFailures(self._rank, lane, self._state, timeout_s)
        self._side_stream = new_stream(heap.device, urgent=True) if self._state.on_gpu else None
        # Of an agreement, the host knows the generation.
        self._agreements = {peer: EdgeAgreement() for peer in range(heap.world_size) if peer != self._rank}

    # Plans

    def plan_exchange(self, call: Call, peers: Sequence[PeerSlice]) -> Plan:
        parts = {piece.rank: piece for piece in peers}
        even = even_parts(call.ranks, parts) if len(call.ranks) <= MAX_PACKED else None
        offsets = even or [offset for piece in peers for offset in (piece.send_offset, piece.recv_offset)]
        # The way depends on where the tensors are, too.
        ways: dict[tuple[bool, bool], Run] = {}

        def prepared(source_in_heap: bool, target_in_heap: bool) -> Run:
            situation = Situation(call.operation, len(call.ranks), call.num_bytes, source_in_heap, target_in_heap)
            choice = self.selector.choose(situation)
            exchange = Exchange(
                call=call,
                heap=self._heap,
                state=self._state,
                lane_index=self._lane_index,
                members=self._members(call, choice, even, parts),
                even=even,
                parts=parts,
                alignment=combined(offsets),
                choice=choice,
            )
            return self._guarding(exchange.members.table, PATHS[choice.path].plan(exchange))

        def run(label: int, source: torch.Tensor, target: torch.Tensor) -> None:
            way = (self._is_in_heap(source), self._is_in_heap(target))
            go = ways.get(way)
            if go is None:
                go = ways[way] = prepared(*way)
            go(label, source, target)

        return self._operation(call, run)

    def plan_heads(self, call: Call, heads: HeadExchange) -> Plan:
        if not fits(heads, self._layout.slot_bytes):
            return plan_by_copies(self, call, heads, self._rank)
        num_bytes, into_place = largest_edge_bytes(heads), fit_places(heads, self.places)
        choice = self.selector.choose(
            Situation(call.operation, len(call.ranks), num_bytes, target_in_heap=into_place)
        )
        if choice.path is Path.COPY_ENGINE:
            splits = zlib.crc32(repr((heads.tokens, heads.units)).encode())
            members = self._of_one_digest(call, _digest(call, choice, num_bytes, splits))
            return self._operation(call, self._guarding(members.table, copy_heads(members, heads, self._heap)))
        index = call.ranks.index(self._rank)
        digests = []
        for position in range(len(call.ranks)):
            # Both ends of an edge need the same digest: the direction from the smaller position comes first.
            ends = sorted((index, position))
            digests.append(_digest(call, choice, edge_bytes(heads, *ends), edge_bytes(heads, *reversed(ends))))
        packed = is_even(heads) and len(call.ranks) <= MAX_PACKED
        table = self._no_table if packed else self._table(table_rows(heads, call.ranks, digests))
        members = self._group(call, digests[0], table, packed)
        if choice.path is Path.DIRECT_PUSH:
            assert self.places is not None  # Selector.obstacle
            run = plan_direct(members, heads, choice, self.places, segment_addresses(self._heap))
        else:
            run = plan_exchange(members, heads, choice)
        return self._operation(call, self._guarding(table, run))

    def plan_all_reduce(self, call: Call, num_elements: int, dtype: torch.dtype) -> Plan | None:
        num_bytes = num_elements * dtype.itemsize
        choice = self.selector.choose(Situation(call.operation, len(call.ranks), num_bytes))
        packed = len(call.ranks) <= MAX_PACKED
        if choice.path is not Path.LOW_LATENCY or dtype not in low_latency_all_reduce.DTYPES or not packed:
            return None
        members = self._group(call, _digest(call, choice, num_bytes, num_bytes), self._no_table, packed)
        launch = low_latency_all_reduce.plan(members, num_elements, dtype, num_programs=choice.num_programs)
        return self._operation(call, lambda label, flat: launch(label, flat.data_ptr()))

    def plan_push(self, call: Call, num_bytes: int) -> Plan:
        return self._plan_one_way(call, num_bytes, lambda path: ONE_WAY_PATHS[path].push)

    def plan_pull(self, call: Call, num_bytes: int) -> Plan:
        return self._plan_one_way(call, num_bytes, lambda path: ONE_WAY_PATHS[path].pull)

    def _plan_one_way(self, call: Call, num_bytes: int, end: Callable[[Path], Any]) -> Plan:
        choice = self.selector.choose(Situation(call.operation, len(call.ranks), num_bytes))
        members = self._of_one_digest(call, _digest(call, choice, num_bytes, 0))
        launch = self._guarding(members.table, end(choice.path)(members, num_bytes, choice))
        # Receivers share an edge with the source only.
        peers = call.ranks[1:] if self._rank == call.ranks[0] else call.ranks[:1]
        return self._operation(call, lambda label, tensor: launch(label, tensor.data_ptr()), peers)

    def _operation(self, call: Call, run: Callable[..., None], peers: Sequence[int] | None = None) -> Plan:
        """``run``, given a label, as an operation of this lane with ``peers``, all other members by default."""
        others = [rank for rank in call.ranks if rank != self._rank] if peers is None else list(peers)
        failures, on_gpu = self._failures, self._state.on_gpu

        def operation(*tensors: Any) -> None:
            self._enter()
            try:
                if failures.reported():
                    self.check()
                if failures.any_broken:
                    failures.refuse_broken(call, others)
                try:
                    run(failures.label(call), *tensors)
                except BaseException as error:  # the peers have issued it, or will
                    failures.mark(others, type(error).__name__)
                    raise
                if not on_gpu:
                    self.check()
            finally:
                self._busy.release()

        return operation

    def _is_in_heap(self, tensor: torch.Tensor) -> bool:
        # Of the storage: a tensor without elements has no address of its own.
        address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
        return address in self._heap_addresses

    def _guarding(self, table: torch.Tensor, run: Callable[..., None]) -> Callable[..., None]:
        """``run``, whose kernels read ``table``: a graph that captures them may read it at any time."""
        if table is self._no_table or not self._state.on_gpu:
            return run

        def guarded(*arguments: Any) -> None:
            if torch.cuda.is_current_stream_capturing():
                self._captured[table.data_ptr()] = table
            run(*arguments)

        return guarded

    # Failures

    @property
    def num_failures(self) -> int:
        return self._failures.num_taken

    def abort(self, ranks: Iterable[int], newest: int | None = None) -> None:
        with self._aside():
            for rank in ranks:
                mark = self._agreements[rank].generation << 1 | 1
                if newest is not None and mark >> 1 > newest:
                    continue
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
        # Ranks share what they compile by a cache on disk: they begin with different ones.
        first = self._rank * len(variants) // self._heap.world_size
        launcher.warm_up([*variants[first:], *variants[:first]])
        # What an abort needs of torch: loading it then would wait for the kernels that are to be aborted.
        with self._aside():
            self._no_table[0] = 0

    def _enter(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise ValueError(f"lane {self._lane!r} of rank {self._rank} is in use by another thread")

    def _members(
        self, call: Call, choice: Choice, even: EvenParts | None, parts: Mapping[int, PeerSlice]
    ) -> Members:
        if even is not None:
            digest = _digest(call, choice, even.num_bytes, even.num_bytes)
            return self._group(call, digest, self._no_table, packed=True)
        rows = []
        for rank in call.ranks:
            piece = parts.get(rank, PeerSlice(rank, 0, 0, 0, 0))
            forth, back = piece.send_bytes, piece.recv_bytes
            # One digest for both directions of an edge: that from the smaller rank comes first.
            digest = _digest(call, choice, *((forth, back) if self._rank < rank else (back, forth)))
            rows.append(_row(*piece, digest))
        digest = _digest(call, choice, call.num_bytes or 0, call.num_bytes or 0)
        return self._group(call, digest, self._table(rows), packed=False)

    def _group(self, call: Call, digest: int, table: torch.Tensor, packed: bool) -> Members:
        index = call.ranks.index(self._rank)
        return Members(self._state.constants, call.ranks, index, digest, table, packed, self._state.on_gpu)

    def _of_one_digest(self, call: Call, digest: int) -> Members:
        """All edges say the same."""
        packed = len(call.ranks) <= MAX_PACKED
        table = self._no_table if packed else self._table([_row(rank) for rank in call.ranks])
        return self._group(call, digest, table, packed)

    def _table(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """In device memory, by a copy that the host does not wait for. It lives as long as its plan.

        What still reads it then was launched on this stream before whatever gets its memory.
        """
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=self._state.on_gpu)
        return table.to(self._heap.device, non_blocking=True)

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


def _row(*words: int) -> tuple[int, ...]:
    return (*words, *(0,) * (ROW_WORDS - len(words)))


def _digest(call: Call, choice: Choice, forth_bytes: int, back_bytes: int) -> int:
    how = f"{choice.path.protocol} {choice.chunk_bytes} {choice.num_programs} {back_bytes}".encode()
    return edge_digest(call.seed ^ zlib.crc32(how), call.operation, forth_bytes)
