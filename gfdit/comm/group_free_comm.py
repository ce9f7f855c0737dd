"""Group-free collectives: any ordered subset of ranks, no communicator per subset (paper §4).

One world-level set-up (the heap) serves every group; a group is metadata. Names and semantics follow
``torch.distributed``. What the caller guarantees is pairwise-consistent order: any two ranks issue the
operations they share, on one lane, in the same order. What the caller gets when it, or a peer, fails is a
CommError within ``timeout_s``, never a hang; other edges keep working.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from gfdit.comm.beside import Beside
from gfdit.comm.checks import (
    check_disjoint,
    check_gathered_shape,
    check_same_dtype,
    check_tensor,
    row_splits,
)
from gfdit.comm.group import Group, make_group
from gfdit.comm.heads import HeadExchange, gather_exchange, scatter_exchange
from gfdit.comm.heap import Call, Operation, PeerSlice, Plan, SymmetricHeap
from gfdit.comm.heap_descriptor import BESIDE_LANE
from gfdit.comm.reduction import OrderedSum, check_summable
from gfdit.comm.selector import Selector
from gfdit.comm.slices import consecutive_slices

# Of what was done last, the plans are kept: a server meets ever new sizes.
MAX_PLANS = 1024

_Planned = TypeVar("_Planned")
Outputs = Callable[[], tuple[torch.Tensor, ...]]


class GroupFreeComm:
    """Collectives of one rank on one lane of a symmetric heap.

    Tensors are on the heap's device, of any dtype; inputs may be strided, outputs must be contiguous. Each
    operation raises ValueError for the caller's mistakes before it communicates, and CommTimeout,
    CommMismatch or CommAborted when the peers do not agree. ``timeout_s`` bounds each wait for one peer, so
    a long message that makes progress is never cut off. After a CommError the edges of the operation need
    ``reset``.

    One thread at a time per lane; lanes are independent. ``abort`` may be called from any thread.
    """

    def __init__(self, heap: SymmetricHeap, timeout_s: float = 30.0, *, lane: str | None = None) -> None:
        """Opens ``lane`` of the heap, by default its first one (``"compute"``).

        Raises ValueError if the lane is unknown or was opened already: then use ``lane()`` of that
        communicator.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.lane_name = lane or heap.lanes[0]
        self.timeout_s = timeout_s
        self.rank = heap.rank
        self.world_size = heap.world_size
        self._heap = heap
        self._device = heap.device
        self._transport = heap.open_lane(self.lane_name, timeout_s=timeout_s)
        self._sum = OrderedSum(self._transport, heap.device)
        self._nothing = torch.empty(0, dtype=torch.uint8, device=heap.device)
        # By operation, group and what is the same whenever the same layers run: shapes, strides, dtypes.
        self._plans: dict[Hashable, object] = {}
        self._plans_version = 0
        self._siblings = {self.lane_name: self}
        self._siblings_lock = threading.Lock()
        self._beside: Beside | None = None

    def lane(self, name: str) -> GroupFreeComm:
        """The communicator of lane ``name`` over the same heap: own counters and slots, own thread.

        The same object every time. Raises ValueError for a lane the heap was not created with.
        """
        with self._siblings_lock:
            if name not in self._siblings:
                sibling = GroupFreeComm(self._heap, self.timeout_s, lane=name)
                sibling._siblings, sibling._siblings_lock = self._siblings, self._siblings_lock
                self._siblings[name] = sibling
            return self._siblings[name]

    def beside(self) -> Beside:
        """Where collectives run beside those of this lane; the same object every time.

        What happens to this lane happens to that one: it is aborted, reset and checked with it. It is lane
        ``"beside"`` of the heap, which the first of its lanes has for itself; this one where there is none.
        """
        if self._beside is None:
            has_lane = self.lane_name == self._heap.lanes[0] and BESIDE_LANE in self._heap.lanes
            self._beside = Beside.of(self.lane(BESIDE_LANE)) if has_lane else Beside(self, None)
        return self._beside

    def _lanes(self) -> list[GroupFreeComm]:
        """This one and that beside it."""
        if self._beside is None or self._beside.comm is self:
            return [self]
        return [self, self._beside.comm]

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""
        return self._device

    @property
    def heap(self) -> SymmetricHeap:
        return self._heap

    @property
    def selector(self) -> Selector | None:
        """What chooses how kernels move data, and can say why; None where the host moves it."""
        return self._transport.selector

    def open_lanes(self) -> list[GroupFreeComm]:
        """The communicators of all lanes opened so far, this one among them."""
        with self._siblings_lock:
            return list(self._siblings.values())

    def group(self, ranks: Sequence[int]) -> Group:
        """A logical group of global ranks in this order, valid on every lane. Non-members do nothing.

        Raises ValueError for duplicates, ranks outside the world, or when this rank is not a member.
        """
        return make_group(ranks, rank=self.rank, world_size=self.world_size, session=self._heap.session)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in this rank's part of the heap: collectives need not stage it.

        Either all members of a group pass such a tensor as the input (or the output) of a collective, or none.
        Its memory is used again once no tensor views it. Raises ValueError when the heap's ``scratch_bytes`` are
        used up.
        """
        return self._heap.tensors.empty(shape, dtype)

    def empty_for_heads(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Uninitialised outputs for one exchange of heads: where peers can put them, if such a place is free.

        Up to three. They are kept as any tensor is; only when nothing views them any more is their place free.
        """
        shapes = tuple(map(tuple, shapes))
        return self._planned(("empty", shapes, dtype), lambda: self._plan_outputs(shapes, dtype))()

    def _plan_outputs(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> Outputs:
        places, device = self._transport.places, self._device
        take = places.plan(shapes, dtype) if places else lambda: None
        return lambda: take() or tuple([torch.empty(shape, dtype=dtype, device=device) for shape in shapes])

    def barrier(self, group: Group) -> None:
        """Returns once every member has entered."""
        plan = self._planned(("barrier", group), lambda: self._plan_barrier(group))
        plan(self._nothing, self._nothing)

    def _plan_barrier(self, group: Group) -> Plan:
        self._check_member(group)
        peers = [PeerSlice(peer, 0, 0, 0, 0) for peer in group.peers]
        return self._transport.plan_exchange(_call(Operation.BARRIER, group, 0), peers)

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> None:
        """``out[i]`` := ``x`` of the member at position ``i``.

        Shapes: ``x`` (rows, ...), the same in all members; ``out`` (len(group) * rows, ...) or
        (len(group), rows, ...). ``x`` may be this rank's own part of ``out``.
        """
        key = ("all_gather", group, self._metadata("out", out), self._metadata("x", x))
        self._planned(key, lambda: self._plan_all_gather(out, x, group))(x.contiguous(), out)

    def _plan_all_gather(self, out: torch.Tensor, x: torch.Tensor, group: Group) -> Plan:
        self._check_member(group)
        self._check_pair(out, x)
        check_gathered_shape(out, x, len(group))
        size = x.nbytes
        pieces = [PeerSlice(rank, 0, size, index * size, size) for index, rank in enumerate(group.ranks)]
        pieces = pieces[group.index + 1 :] + pieces[: group.index + 1]  # peers in their order, itself last
        return self._transport.plan_exchange(_call(Operation.ALL_GATHER, group, size), pieces)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        group: Group,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        """Part ``i`` of ``x`` goes to position ``i``; part ``i`` of ``out`` comes from it. Parts along dim 0.

        Split sizes are rows per position, equal parts by default; either all members give some or none does.
        What a rank sends to a peer must be what the peer expects from it (else CommMismatch). ``out`` and ``x``
        must not overlap.
        """
        splits = _fixed(output_split_sizes), _fixed(input_split_sizes)
        key = ("all_to_all", group, self._metadata("out", out), self._metadata("x", x), splits)
        plan = self._planned(key, lambda: self._plan_all_to_all(out, x, group, *splits))
        x = x.contiguous()
        check_disjoint(out, x)
        plan(x, out)

    def _plan_all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        group: Group,
        output_split_sizes: tuple[int, ...] | None,
        input_split_sizes: tuple[int, ...] | None,
    ) -> Plan:
        self._check_member(group)
        self._check_pair(out, x)
        send_rows = row_splits("input", x, input_split_sizes, len(group))
        recv_rows = row_splits("output", out, output_split_sizes, len(group))
        send_bytes, recv_bytes = _row_bytes(x), _row_bytes(out)
        if send_bytes != recv_bytes and x.numel() and out.numel():
            raise ValueError(f"rows of {tuple(out.shape[1:])} cannot receive rows of {tuple(x.shape[1:])}")
        if send_rows[group.index] != recv_rows[group.index]:
            raise ValueError(
                f"rank {self.rank} keeps {send_rows[group.index]} rows of its input "
                f"but {recv_rows[group.index]} rows of its output"
            )
        pieces = consecutive_slices(
            group, [rows * send_bytes for rows in send_rows], [rows * recv_bytes for rows in recv_rows]
        )
        uneven = input_split_sizes is not None or output_split_sizes is not None
        num_bytes = None if uneven else x.nbytes // len(group)
        return self._transport.plan_exchange(_call(Operation.ALL_TO_ALL, group, num_bytes), pieces)

    def scatter_heads(
        self,
        tensors: Sequence[torch.Tensor],
        group: Group,
        *,
        tokens: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        out: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Ulysses, before attention: (B, L, H, D) each to (B, S, h, D), the own heads of all tokens.

        ``tensors`` share B, L and dtype; those with fewer heads (grouped attention) are split in proportion.
        ``tokens`` are the members' L by position, the own one for all by default; S is their sum. ``heads`` says
        how the fewest heads are split, equally by default. ``out`` may be any tensors of the right shapes, for
        example slices of larger ones. Raises ValueError for what does not fit.
        """
        splits = _fixed(tokens), _fixed(heads)
        key = (
            "scatter_heads",
            group,
            self._all_metadata(tensors),
            None if out is None else self._all_metadata(out),
            splits,
        )
        plan, outputs = self._planned(key, lambda: self._plan_scatter(tensors, group, *splits, out))
        targets = outputs() if out is None else tuple(out)
        plan(tensors, targets)
        return targets

    def _plan_scatter(
        self,
        tensors: Sequence[torch.Tensor],
        group: Group,
        tokens: tuple[int, ...] | None,
        heads: tuple[int, ...] | None,
        out: Sequence[torch.Tensor] | None,
    ) -> tuple[Plan, Outputs]:
        self._check_member(group)
        tensors, out = _meta(tensors), None if out is None else _meta(out)
        exchange = scatter_exchange(tensors, len(group), group.index, tokens=tokens, heads=heads, out=out)
        return self._plan_heads(Operation.SCATTER_HEADS, group, exchange)

    def gather_heads(
        self,
        tensor: torch.Tensor,
        group: Group,
        *,
        tokens: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        replicated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ulysses, after attention: (B, S, h, D) to (B, L, H, D), all heads of the own tokens.

        ``tokens`` says how S is split, equally by default; with ``replicated`` every member gets all of them.
        ``heads`` are the members' h by position, the own one for all by default. Otherwise like
        ``scatter_heads``.
        """
        splits, outs = (_fixed(tokens), _fixed(heads)), None if out is None else (out,)
        key = (
            "gather_heads",
            group,
            self._metadata("tensor", tensor),
            None if outs is None else self._all_metadata(outs),
            splits,
            replicated,
        )
        plan, outputs = self._planned(key, lambda: self._plan_gather(tensor, group, *splits, replicated, outs))
        targets = outputs() if outs is None else outs
        plan((tensor,), targets)
        return targets[0]

    def _plan_gather(
        self,
        tensor: torch.Tensor,
        group: Group,
        tokens: tuple[int, ...] | None,
        heads: tuple[int, ...] | None,
        replicated: bool,
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[Plan, Outputs]:
        self._check_member(group)
        exchange = gather_exchange(
            _meta((tensor,))[0],
            len(group),
            group.index,
            tokens=tokens,
            heads=heads,
            replicated=replicated,
            out=None if outs is None else _meta(outs)[0],
        )
        return self._plan_heads(Operation.GATHER_HEADS, group, exchange)

    def _plan_heads(self, operation: Operation, group: Group, exchange: HeadExchange) -> tuple[Plan, Outputs]:
        """The operation, and what makes its outputs."""
        plan = self._transport.plan_heads(_call(operation, group), exchange)
        shapes = [target.shape for target in exchange.targets]
        return plan, self._plan_outputs(shapes, exchange.sources[0].dtype)

    def broadcast(self, x: torch.Tensor, src: int, group: Group) -> None:
        """``x`` of global rank ``src`` to every member, in place. The source need not wait for the others."""
        key = ("broadcast", group, src, self._metadata("x", x))
        plan = self._planned(key, lambda: self._plan_broadcast(x, src, group))
        plan(x.contiguous())

    def _plan_broadcast(self, x: torch.Tensor, src: int, group: Group) -> Plan:
        self._check_member(group)
        if src not in group.ranks:
            raise ValueError(f"the source of a broadcast, rank {src}, is not in group {group.ranks}")
        check_tensor("x", x, self._device, contiguous=src != self.rank)
        others = tuple(rank for rank in group.ranks if rank != src)
        call = _call(Operation.BROADCAST, group)._replace(ranks=(src, *others))
        plan = self._transport.plan_push if src == self.rank else self._transport.plan_pull
        return plan(call, x.nbytes)

    def all_reduce(self, x: torch.Tensor, group: Group) -> None:
        """Sum over the members, in place, ``x`` of any strides. Every member gets the same bits.

        Added in group order whatever the size; half-precision types in float32, rounded once. Raises
        ValueError for dtypes without a sum (bool, fp8, complex).
        """
        plan = self._planned(
            ("all_reduce", group, self._metadata("x", x)), lambda: self._plan_all_reduce(x, group)
        )
        if not group.peers:
            return
        dense = x.contiguous()
        plan(dense.view(-1))
        if dense is not x:
            x.copy_(dense)

    def _plan_all_reduce(self, x: torch.Tensor, group: Group) -> Plan:
        self._check_member(group)
        check_tensor("x", x, self._device, contiguous=False)
        check_summable(x)
        return self._sum.plan(_call(Operation.ALL_REDUCE, group), x.numel(), x.dtype, group)

    def send(self, x: torch.Tensor, dst: int) -> None:
        """All of ``x`` to global rank ``dst``. May return before, and may wait until, it is received."""
        plan = self._planned(("send", dst, self._metadata("x", x)), lambda: self._plan_send(x, dst))
        plan(x.contiguous())

    def _plan_send(self, x: torch.Tensor, dst: int) -> Plan:
        self._check_partner(dst)
        check_tensor("x", x, self._device, contiguous=False)
        return self._transport.plan_push(self._pair_call(self.rank, dst), x.nbytes)

    def recv(self, out: torch.Tensor, src: int) -> None:
        """Fill ``out`` with what global rank ``src`` sends; sizes must agree."""
        self._planned(("recv", src, self._metadata("out", out)), lambda: self._plan_recv(out, src))(out)

    def _plan_recv(self, out: torch.Tensor, src: int) -> Plan:
        self._check_partner(src)
        check_tensor("out", out, self._device, contiguous=True)
        return self._transport.plan_pull(self._pair_call(src, self.rank), out.nbytes)

    # Plans

    def _planned(self, key: Hashable, make: Callable[[], _Planned]) -> _Planned:
        """What ``make`` gives, kept for the next time."""
        selector = self._transport.selector
        if selector is not None and selector.version != self._plans_version:
            self._plans.clear()
            self._plans_version = selector.version
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan  # type: ignore[return-value]

    def _metadata(self, name: str, tensor: torch.Tensor) -> tuple[object, ...]:
        """All of a tensor that a plan depends on. Raises ValueError if it is not one of this communicator's."""
        if tensor.device != self._device or tensor.layout is not torch.strided:
            check_tensor(name, tensor, self._device, contiguous=False)
        return tensor.shape, tensor.stride(), tensor.dtype

    def _all_metadata(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[object, ...], ...]:
        return tuple([self._metadata("a tensor of heads", tensor) for tensor in tensors])

    def check(self) -> None:
        """Raise the CommError that an operation of this lane has run into since the last one was raised.

        For devices, where an operation returns before it is done: call it after the stream was synchronised, or
        after a captured graph was replayed. Waits for nothing. The next operation would raise it, too.
        """
        for lane in self._lanes():
            lane._transport.check()

    @property
    def num_failures(self) -> int:
        """How many failures of the device the operations and checks of this lane have raised so far."""
        return sum(lane._transport.num_failures for lane in self._lanes())

    def synchronize(self) -> None:
        """Wait until the current stream has run all it was given, then ``check``. On a CPU it is ``check``."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.check()

    def warm_up(self) -> None:
        """Prepare all that operations may need, so that none of them compiles anything. Communicates nothing."""
        self._transport.warm_up()

    def abort(self, ranks: Iterable[int], newest: int | None = None) -> None:
        """Make every wait on the edges shared with ``ranks``, here and there, raise CommAborted promptly.

        Of this lane only. Callable from any thread; holds until ``reset``. Edges to other ranks go on, and so do
        those that were reset to a generation above ``newest`` meanwhile.
        """
        peers = self._checked_peers(ranks)
        for lane in self._lanes():
            lane._transport.abort(peers, newest)

    def reset(self, peers: Iterable[int], generation: int | None = None) -> None:
        """Start this lane's edges shared with ``peers`` afresh, after a failed or aborted operation.

        Host protocol, for each unordered pair of ranks to recover:

        1. *Quiesce.* Both ranks have left their failed operation (it raised) and issue nothing on the edge. A
           rank that may be stuck is aborted first; a dead one is quiet by nature.
        2. *Reset.* Both call ``reset`` naming the other, in any order and at any time after 1 is true of
           both.
        3. *Resume.* A rank may use the edge as soon as its own reset returned; it need not know that the
           peer's has, since a reset erases nothing that the peer may already have written. A rank that used
           the edge without resetting would get CommMismatch or CommTimeout.

        Both ends must reset equally often, or pass the same ``generation`` (larger than any before, for
        example a recovery number chosen by the control plane); a rank process that replaces a dead one
        attaches to the same heap and must be given it. Raises ValueError if this lane is inside an
        operation.
        """
        ranks = self._checked_peers(peers)
        for lane in self._lanes():
            lane._transport.reset(ranks, generation)

    def _check_member(self, group: Group) -> None:
        if group.rank != self.rank:
            raise ValueError(f"rank {self.rank} was given a group made by rank {group.rank}")

    def _check_pair(self, out: torch.Tensor, x: torch.Tensor) -> None:
        check_tensor("out", out, self._device, contiguous=True)
        check_tensor("x", x, self._device, contiguous=False)
        check_same_dtype(out, x)

    def _check_partner(self, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot exchange with rank {rank}")

    def _checked_peers(self, ranks: Iterable[int]) -> list[int]:
        """The given ranks without this one, so that a group's ranks can be passed as they are."""
        peers = sorted({int(rank) for rank in ranks} - {self.rank})
        for peer in peers:
            self._check_partner(peer)
        return peers

    def _pair_call(self, src: int, dst: int) -> Call:
        pair = make_group((src, dst), rank=self.rank, world_size=self.world_size, session=self._heap.session)
        return _call(Operation.SEND, pair)


def _call(operation: Operation, group: Group, num_bytes: int | None = None) -> Call:
    return Call(operation, group.seed, group.ranks, num_bytes)


def _fixed(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def _meta(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same without their memory, which a plan must not keep."""
    return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors)


def _row_bytes(tensor: torch.Tensor) -> int:
    num_elements = 1
    for extent in tensor.shape[1:]:
        num_elements *= extent
    return num_elements * tensor.element_size()
