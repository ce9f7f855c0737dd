"""Agreement and data movement by the host, over memory that every rank process maps.

Each rank pushes its bytes into the receiver's data slot and publishes; the receiver observes and copies
out. The data slot of an instance has the parity of its signal slot, so the proof in
``gfdit.comm.agreement`` covers both and a two-way collective needs no closing barrier: a member may return
and start the next one while its peers still copy the previous one out. Messages larger than a slot go in
rounds, one instance of the edge each; in every round a rank publishes to all peers before it waits for any,
so no cyclic wait can form.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from gfdit.comm.agreement import NUM_SLOTS, EdgeAgreement, edge_digest, is_behind
from gfdit.comm.errors import CommAborted, CommError, CommMismatch, CommTimeout
from gfdit.comm.futex import Waiter
from gfdit.comm.heads import HeadExchange, plan_by_copies
from gfdit.comm.heap import Call, PeerSlice, Plan
from gfdit.comm.layout import ABORT_WORD, CREDIT_WORD, MAX_CHUNKS, SIGNAL_WORD, WORD_BYTES, SegmentLayout

# Long enough to catch a peer that is already on its way, short enough to cost nothing; yields every turn.
_SPIN_S = 60e-6
# A core given away for longer than this is shared, and comes back sooner to who sleeps and is woken: for a while
# waits do not yield.
_LONG_YIELD_S = 500e-6
_CROWDED_S = 0.2
# Bounds what an abort that races with falling asleep can cost.
_SLEEP_SLICE_S = 0.02
# A host copies a slot in one piece: of a slot's tokens it uses the first.
TOKEN_WORDS = tuple(SIGNAL_WORD + slot * MAX_CHUNKS for slot in range(NUM_SLOTS))


@dataclass(slots=True)
class Port:
    """This rank's end of the two edges shared with ``peer``: word indices and slot addresses.

    ``inbound`` words are in this rank's segment (waited on here), ``outbound`` ones in the peer's.
    """

    peer: int
    inbound_line: int
    outbound_line: int
    inbound_slots: tuple[int, ...]
    outbound_slots: tuple[int, ...]
    agreement: EdgeAgreement = field(default_factory=EdgeAgreement)
    broken: str = ""

    @property
    def abort_mark(self) -> int:
        """What an abort writes: valid for the current generation only, so that a reset outdates it."""
        return self.agreement.generation << 1 | 1


class HostTransport:
    """One lane of one rank. See ``Transport``; raises CommError subclasses from every wait.

    After any failure inside an operation, the edges it used refuse further work (CommAborted) until
    ``reset``: their ends may have counted differently.
    """

    selector = None  # there is one way
    places = None
    num_failures = 0  # operations raise their own

    def __init__(
        self,
        *,
        rank: int,
        lane: str,
        lane_index: int,
        layout: SegmentLayout,
        words: memoryview,
        address: int,
        timeout_s: float,
        waiter: Waiter,
        fence: Callable[[], object] | None,
    ) -> None:
        self._rank = rank
        self._lane = lane
        self._words = words
        self._address = address
        self._timeout_s = timeout_s
        self._waiter = waiter
        self._fence = fence
        self._slot_bytes = layout.slot_bytes
        self._busy = threading.Lock()
        self._in_use: Sequence[Port] = ()
        self._crowded_until = 0.0
        self._ports = {
            peer: _make_port(layout, lane_index, address, rank, peer)
            for peer in range(layout.world_size)
            if peer != rank
        }

    def plan_exchange(self, call: Call, peers: Sequence[PeerSlice]) -> Plan:
        others = [(self._ports[piece.rank], piece) for piece in peers if piece.rank != self._rank]
        own = [piece for piece in peers if piece.rank == self._rank and piece.send_bytes]
        ports = [port for port, _ in others]

        def run(source: torch.Tensor, target: torch.Tensor) -> None:
            source_address, target_address = source.data_ptr(), target.data_ptr()
            with self._operation(call, ports):
                begin, remote = 0, others
                while remote or not begin:
                    for port, piece in remote:
                        self._push(port, call, piece.send_bytes, begin, source_address + piece.send_offset)
                    for piece in own if not begin else ():
                        place = target_address + piece.recv_offset
                        ctypes.memmove(place, source_address + piece.send_offset, piece.send_bytes)
                    for port, piece in remote:
                        self._pull(port, call, piece.recv_bytes, begin, target_address + piece.recv_offset)
                        port.agreement.consume_two_way()
                    begin += self._slot_bytes
                    remote = [(port, p) for port, p in remote if max(p.send_bytes, p.recv_bytes) > begin]

        return run

    def plan_heads(self, call: Call, heads: HeadExchange) -> Plan:
        return plan_by_copies(self, call, heads, self._rank)

    def plan_all_reduce(self, call: Call, num_elements: int, dtype: torch.dtype) -> Plan | None:
        return None

    def plan_push(self, call: Call, num_bytes: int) -> Plan:
        ports = [self._ports[rank] for rank in call.ranks[1:]]

        def run(source: torch.Tensor) -> None:
            address = source.data_ptr()
            with self._operation(call, ports):
                for begin in range(0, max(num_bytes, 1), self._slot_bytes):
                    for port in ports:
                        self._push(port, call, num_bytes, begin, address)

        return run

    def plan_pull(self, call: Call, num_bytes: int) -> Plan:
        port = self._ports[call.ranks[0]]

        def run(target: torch.Tensor) -> None:
            address = target.data_ptr()
            with self._operation(call, [port]):
                for begin in range(0, max(num_bytes, 1), self._slot_bytes):
                    self._pull(port, call, num_bytes, begin, address)
                    self._store(port.outbound_line + CREDIT_WORD, port.agreement.consume_one_way())

        return run

    def check(self) -> None:
        """Operations raise themselves."""

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def abort(self, ranks: Iterable[int], newest: int | None = None) -> None:
        for rank in ranks:
            port = self._ports[rank]
            mark = port.abort_mark  # read once: a reset meanwhile outdates it
            if newest is not None and mark >> 1 > newest:
                continue
            for line in (port.outbound_line, port.inbound_line):
                self._words[line + ABORT_WORD] = mark
                for word in (CREDIT_WORD, *TOKEN_WORDS):
                    self._waiter.wake(self._address + WORD_BYTES * (line + word))

    def reset(self, ranks: Iterable[int], generation: int | None = None) -> None:
        ports = [self._ports[rank] for rank in ranks]
        self._enter()
        try:
            generations = [port.agreement.next_generation(generation) for port in ports]
            for port, new in zip(ports, generations, strict=True):
                port.agreement.reset(new)
                port.broken = ""
        finally:
            self._busy.release()

    def _operation(self, call: Call, ports: Sequence[Port]) -> _Operation:
        self._enter()
        try:
            self._refuse_if_aborted(ports, call)
        except BaseException:
            self._busy.release()
            raise
        self._in_use = ports
        return _Operation(self._busy, ports)

    def _enter(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise ValueError(f"lane {self._lane!r} of rank {self._rank} is in use by another thread")

    def _push(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        """Copy one chunk into the peer's slot and publish it."""
        agreement = port.agreement
        needed = agreement.credit_needed()
        if needed is not None:
            edge = (port.peer, self._rank)
            self._wait(call, port.inbound_line + CREDIT_WORD, needed, edge, "waiting for credit")
            agreement.credit_reached()
        slot, token = agreement.publish(edge_digest(call.seed, call.operation, num_bytes))
        chunk_bytes = min(num_bytes - begin, self._slot_bytes)
        if chunk_bytes > 0:
            ctypes.memmove(port.outbound_slots[slot], address + begin, chunk_bytes)
        self._store(port.outbound_line + TOKEN_WORDS[slot], token)

    def _pull(self, port: Port, call: Call, num_bytes: int, begin: int, address: int) -> None:
        """Observe one chunk of the peer and copy it out; the caller completes the instance."""
        slot = self._observe(port, call, num_bytes)
        chunk_bytes = min(num_bytes - begin, self._slot_bytes)
        if chunk_bytes > 0:
            ctypes.memmove(address + begin, port.inbound_slots[slot], chunk_bytes)

    def _observe(self, port: Port, call: Call, num_bytes: int) -> int:
        """Wait for the peer's token of this instance; returns the data slot that holds its payload."""
        slot, expected = port.agreement.expect(edge_digest(call.seed, call.operation, num_bytes))
        edge = (port.peer, self._rank)
        observed = self._wait(call, port.inbound_line + TOKEN_WORDS[slot], expected, edge)
        if observed != expected:
            detail = f"{call.describe()}, {num_bytes} bytes expected on this edge"
            raise CommMismatch(
                self._rank, edge, expected, observed, self._lane, call.operation.name.lower(), detail
            )
        return slot

    def _store(self, word: int, value: int) -> None:
        """Store with release order, then wake the waiter."""
        if self._fence is not None:
            self._fence()
        self._words[word] = value
        self._waiter.wake(self._address + WORD_BYTES * word)

    def _wait(self, call: Call, word: int, expected: int, edge: tuple[int, int], detail: str = "") -> int:
        """Load ``word`` with acquire order until it is no longer behind ``expected``; returns its value."""
        words = self._words
        observed = words[word]
        if observed != expected and is_behind(observed, expected):
            observed = self._wait_slowly(call, word, expected, edge, detail)
        if self._fence is not None:
            self._fence()
        return observed

    def _wait_slowly(self, call: Call, word: int, expected: int, edge: tuple[int, int], detail: str) -> int:
        now = time.monotonic()
        spin_until = now + _SPIN_S if now >= self._crowded_until else now
        deadline, attempt = now + self._timeout_s, 0
        while is_behind(observed := self._words[word], expected):
            # Of all edges in use: a peer that was aborted, too, may have left without serving this one.
            self._refuse_if_aborted(self._in_use, call, expected, observed)
            now = time.monotonic()
            if now >= deadline:
                detail = ", ".join(filter(None, (call.describe(), detail, f"after {self._timeout_s:g} s")))
                raise CommTimeout(
                    self._rank, edge, expected, observed, self._lane, call.operation.name.lower(), detail
                )
            if now < spin_until:
                _yield_core()
                if (back := time.monotonic()) - now > _LONG_YIELD_S:
                    self._crowded_until, spin_until = back + _CROWDED_S, back
            else:
                address = self._address + WORD_BYTES * word
                self._waiter.wait(address, observed, min(deadline - now, _SLEEP_SLICE_S), attempt)
                attempt += 1
        return observed

    def _refuse_if_aborted(self, ports: Sequence[Port], call: Call, expected: int = 0, observed: int = 0) -> None:
        for port in ports:
            if self._words[port.inbound_line + ABORT_WORD] == port.abort_mark:
                detail = f"{call.describe()}; the edge was aborted"
            elif port.broken:
                detail = f"{call.describe()}; the edge needs a reset since {port.broken}"
            else:
                continue
            edge, operation = (port.peer, self._rank), call.operation.name.lower()
            raise CommAborted(self._rank, edge, expected, observed, self._lane, operation, detail)


class _Operation:
    """Scope of one operation: on failure its edges are marked broken, in any case the lane is free again."""

    __slots__ = ("_busy", "_ports")

    def __init__(self, busy: threading.Lock, ports: Sequence[Port]) -> None:
        self._busy = busy
        self._ports = ports

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            reason = f"'{error}'" if isinstance(error, CommError) else f"{type(error).__name__}"
            for port in self._ports:
                port.broken = port.broken or reason
        self._busy.release()


def _yield_core() -> None:
    """Let another runnable thread have the core; macOS has no ``sched_yield`` in ``os``."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _make_port(layout: SegmentLayout, lane: int, address: int, rank: int, peer: int) -> Port:
    mine, theirs = rank * layout.segment_bytes, peer * layout.segment_bytes
    return Port(
        peer=peer,
        inbound_line=(mine + layout.line_offset(lane, rank, peer)) // WORD_BYTES,
        outbound_line=(theirs + layout.line_offset(lane, peer, rank)) // WORD_BYTES,
        inbound_slots=tuple(
            address + mine + layout.slot_offset(lane, rank, peer, slot) for slot in range(NUM_SLOTS)
        ),
        outbound_slots=tuple(
            address + theirs + layout.slot_offset(lane, peer, rank, slot) for slot in range(NUM_SLOTS)
        ),
    )
