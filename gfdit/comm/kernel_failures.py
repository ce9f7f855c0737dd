"""What the kernels of a lane report in its status cell, as errors, and which edges need a reset since."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

from gfdit.comm.agreement import CREDIT_DIGEST, digest_of, instance_of
from gfdit.comm.errors import CommAborted, CommError, CommMismatch, CommTimeout
from gfdit.comm.heap import Call, Operation
from gfdit.comm.kernel_state import LaneState
from gfdit.kernels import edges

_UNSIGNED = (1 << 64) - 1
_ERRORS: dict[int, type[CommError]] = {
    edges.TIMED_OUT.value: CommTimeout,
    edges.MISMATCHED.value: CommMismatch,
    edges.ABORTED.value: CommAborted,
}
_OPERATION_BITS = 8
# Labels are 32-bit integers, so that all launches have the same types.
_NUM_LABELS = 1 << (30 - _OPERATION_BITS)
# More than a host runs ahead of its device.
_NUM_REMEMBERED = 4096


class KernelFailures:
    """One lane's. Launches take a label along, so that a failure seen later can be told in words."""

    def __init__(self, rank: int, lane: str, state: LaneState, timeout_s: float) -> None:
        self._rank = rank
        self._lane = lane
        self._state = state
        self._timeout_s = timeout_s
        self._num_launches = 0
        self.num_taken = 0
        self._calls: deque[tuple[int, Call]] = deque(maxlen=_NUM_REMEMBERED)
        self._broken: dict[int, str] = {}
        # Not through torch: it is looked at before every launch.
        self._kind = ctypes.c_int64.from_address(state.status.data_ptr() + 8 * edges.STATUS_KIND.value)

    def label(self, call: Call) -> int:
        """What the next launch, of ``call``, passes as its operation."""
        self._num_launches += 1
        number = self._num_launches % _NUM_LABELS
        self._calls.append((number, call))
        return number << _OPERATION_BITS | call.operation

    @property
    def any_broken(self) -> bool:
        """Whether any edge needs a reset."""
        return bool(self._broken)

    def reported(self) -> bool:
        """Whether a kernel has failed; waits for nothing."""
        return self._kind.value != 0

    def take(self) -> CommError:
        """What was reported first. Clears the cell, so no kernel of the lane may be running."""
        self.num_taken += 1  # before it is cleared: who finds the cell clear must find this
        kind, peer, expected, observed, label, *_ = self._state.status.tolist()
        self._state.status.zero_()
        expected, observed, operation = expected & _UNSIGNED, observed & _UNSIGNED, label % (1 << _OPERATION_BITS)
        error = _ERRORS[kind](
            self._rank,
            (peer, self._rank),
            expected,
            observed,
            self._lane,
            Operation(operation).name.lower(),
            self._detail(kind, expected, label >> _OPERATION_BITS),
        )
        broken = self._state.state[edges.STATE_WORDS :].view(-1, edges.EDGE_WORDS)[:, edges.EDGE_BROKEN.value]
        self.mark(broken.nonzero().flatten().tolist(), f"'{error}'")
        return error

    def mark(self, peers: Sequence[int], reason: str) -> None:
        """The edges shared with ``peers`` need a reset."""
        for peer in peers:
            self._broken.setdefault(peer, reason)

    def forget(self, peer: int) -> None:
        """The edge was reset."""
        self._broken.pop(peer, None)

    def refuse_broken(self, call: Call, peers: Sequence[int]) -> None:
        """Raises CommAborted if one of ``peers`` shares an edge that needs a reset."""
        for peer in peers:
            if peer in self._broken:
                detail = f"{call.describe()}; the edge needs a reset since {self._broken[peer]}"
                operation = call.operation.name.lower()
                raise CommAborted(self._rank, (peer, self._rank), 0, 0, self._lane, operation, detail)

    def _detail(self, kind: int, expected: int, number: int) -> str:
        parts = [call.describe() for known, call in self._calls if known == number]
        if kind == edges.ABORTED.value:
            return "; ".join([*parts, "the edge was aborted"])
        if kind == edges.TIMED_OUT.value:
            if digest_of(expected) == CREDIT_DIGEST:
                parts.append("waiting for credit" if instance_of(expected) else "waiting for the peer's reset")
            parts.append(f"after {self._timeout_s:g} s")
        return ", ".join(parts)
