"""Ranks that fail: suspected, probed, exonerated or replaced.

A task that raises on one rank says that something is wrong, not with whom. The rules:

1. An error of the client's (HTTP 4xx) ends the request; the rank is not suspected.
2. Otherwise the rank is suspended and probed, and the request runs again elsewhere: what is suspended is given
   nothing. Where a rank could not send what the task reads, that is the rank, and what it has counts as lost.
3. If the request then succeeds, the rank was to blame. After ``MAX_FAILURES`` of them in a row, without a success
   in between, or at once if its probe fails, its process is replaced. If it then fails again before it has done
   anything else, it is given up, unless it is the last one.
4. If the request fails again by itself, after the first rank has passed its probe, the request is to blame: it
   ends with the error, and no rank is. So it is if it fails on two ranks at a time.
5. A rank that has passed its probe comes back once its requests are judged, after ``PATIENCE_S`` if they never
   are, and at once where nothing can go on without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_FAILURES = 2
PATIENCE_S = 30.0


@dataclass(slots=True)
class _Suspicion:
    """``undecided`` are requests that failed there and have neither succeeded nor failed elsewhere since."""

    probe_id: int
    until_s: float
    undecided: set[str] = field(default_factory=set)
    sending: bool = False  # it could not send what they read
    passed: bool = False  # its probe
    replaced: bool = False  # its process is to be


@dataclass(slots=True)
class _Past:
    """Of a rank, whichever process it has: ``num_failures`` in a row, and whether one was replaced for them.

    ``sending``: the last one was to send something, so that only having sent says that it can again.
    """

    num_failures: int = 0
    on_probation: bool = False
    sending: bool = False


class Quarantine:
    """Who is suspected, and of what. Whoever asks suspends and resumes ranks."""

    def __init__(self) -> None:
        self.suspected: dict[int, _Suspicion] = {}
        self.past: dict[int, _Past] = {}  # of ranks that have failed, and done nothing since

    @property
    def next_expiry_s(self) -> float | None:
        """Nobody comes back by itself before its probe, which a rank that is at a long task answers late."""
        return min(
            [each.until_s for each in self.suspected.values() if each.passed and not each.replaced], default=None
        )

    def suspect(self, rank: int, probe_id: int, now_s: float) -> None:
        """``rank``, of which nothing bad was known, is probed."""
        self.suspected[rank] = _Suspicion(probe_id, now_s + PATIENCE_S)

    def note_failures(self, rank: int, requests: Iterable[str], *, sending: bool = False) -> None:
        """``requests`` have failed together on ``rank``, which is suspected."""
        self.suspected[rank].undecided.update(requests)
        self.suspected[rank].sending |= sending

    def awaits(self, rank: int, probe_id: int) -> bool:
        """Whether that is the probe of ``rank`` that matters, and not one of another process or another time."""
        return rank in self.suspected and self.suspected[rank].probe_id == probe_id

    def passed(self, rank: int) -> bool:
        """Whether ``rank`` has passed its probe, or is not suspected."""
        suspicion = self.suspected.get(rank)
        return suspicion is None or suspicion.passed

    def note_probe(self, rank: int) -> None:
        if suspicion := self.suspected.get(rank):
            suspicion.passed = True

    def note_success(self, rank: int, *, sending: bool = False) -> None:
        """``rank`` has done a task, or sent what another rank needs."""
        if (past := self.past.get(rank)) is not None:
            past.on_probation = False
            if rank not in self.suspected and past.sending == sending:
                del self.past[rank]

    def judge(self, request_id: str, *, guilty_rank: bool) -> None:
        """``request_id`` has succeeded elsewhere: the ranks on which it failed are to blame. Or it has ended."""
        for rank, suspicion in self.suspected.items():
            if request_id in suspicion.undecided:
                suspicion.undecided.discard(request_id)
                if guilty_rank:
                    past = self.past.setdefault(rank, _Past())
                    past.num_failures += 1
                    past.sending = suspicion.sending

    def settled(self, now_s: float) -> list[int]:
        """Ranks that can come back: :meth:`absolve` them, or :meth:`condemn`."""
        passed = {rank: each for rank, each in self.suspected.items() if each.passed and not each.replaced}
        return [rank for rank, each in passed.items() if not each.undecided or each.until_s <= now_s]

    def is_faulty(self, rank: int) -> bool:
        """Whether it has failed too often."""
        past = self.past.get(rank, _Past())
        return past.num_failures >= (1 if past.on_probation else MAX_FAILURES)

    def absolve(self, rank: int) -> None:
        """It is not suspected any more; that it has failed is not forgotten before it succeeds."""
        del self.suspected[rank]

    def condemn(self, rank: int) -> bool:
        """Its process is to be replaced. Say whether it is hopeless: that was done before, and did not help."""
        self.suspected[rank].replaced = True
        past = self.past.setdefault(rank, _Past())
        hopeless, past.on_probation, past.num_failures, past.sending = past.on_probation, True, 0, False
        return hopeless

    def drop(self, rank: int) -> None:
        """``rank`` is lost. Another process of it begins without suspicion, but perhaps on probation."""
        self.suspected.pop(rank, None)

    def check_integrity(self, suspended: set[int], alive: Iterable[str]) -> None:
        assert self.suspected.keys() == suspended, "other ranks are suspended than are suspected"
        undecided = set().union(*[suspicion.undecided for suspicion in self.suspected.values()])
        ended = undecided.difference(alive)
        assert not ended, f"requests that have ended are not judged: {sorted(ended)}"
