"""Calls to several workers whose replies are collected into one message."""

from __future__ import annotations

from dataclasses import dataclass, field

from gfdit.runtime.messages import CallDone


@dataclass(slots=True)
class PendingCalls:
    """``add`` a call for some ranks; ``reply`` returns the collected answer with the last reply."""

    _open: dict[int, dict[int, tuple[bool, bytes] | None]] = field(default_factory=dict)

    def add(self, call_id: int, ranks: tuple[int, ...]) -> None:
        self._open[call_id] = dict.fromkeys(ranks)

    def reply(self, call_id: int, rank: int, ok: bool, value: bytes) -> CallDone | None:
        if (replies := self._open.get(call_id)) is None or replies.get(rank) is not None:
            return None  # answered for it, since it was lost
        replies[rank] = (ok, value)
        collected = [reply for reply in replies.values() if reply is not None]
        if len(collected) < len(replies):
            return None
        del self._open[call_id]
        return CallDone(call_id, collected)

    def lose(self, rank: int) -> list[CallDone]:
        """``rank`` will not answer any more; returns the calls that this completes."""
        waiting = [call_id for call_id, replies in self._open.items() if rank in replies]
        done = [self.reply(call_id, rank, False, f"rank {rank} was lost".encode()) for call_id in waiting]
        return [call for call in done if call is not None]
