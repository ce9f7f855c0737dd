"""What a group-free collective can fail with.

Every error names the rank that raised it, the lane, the operation, the edge ``(source, destination)`` it was
waiting on, and what it expected to find there against what it observed. They pickle, so a worker can report
them across a process boundary unchanged.
"""

from __future__ import annotations

from gfdit.comm.agreement import describe_token

Edge = tuple[int, int]


class CommError(RuntimeError):
    """Base of every communication failure; user mistakes are ``ValueError`` and never reach a peer.

    Attributes: ``rank`` (who raised), ``edge`` (source, destination), ``expected`` and ``observed`` (64-bit
    tokens, see ``gfdit.comm.agreement``), ``lane``, ``operation``, ``detail``.
    """

    summary = "communication failed"

    def __init__(
        self,
        rank: int,
        edge: Edge,
        expected: int = 0,
        observed: int = 0,
        lane: str = "",
        operation: str = "",
        detail: str = "",
    ) -> None:
        # The arguments become ``args``, which is what makes the default pickling of exceptions work.
        super().__init__(rank, edge, expected, observed, lane, operation, detail)
        self.rank = rank
        self.edge = edge
        self.expected = expected
        self.observed = observed
        self.lane = lane
        self.operation = operation
        self.detail = detail

    def __str__(self) -> str:
        source, destination = self.edge
        text = (
            f"rank {self.rank}: {self.summary} in {self.operation or 'a collective'} on lane {self.lane!r}, "
            f"edge {source}->{destination}"
        )
        if self.expected:  # zero: refused before it waited for anything
            text += f": expected {describe_token(self.expected)}, observed {describe_token(self.observed)}"
        return f"{text} ({self.detail})" if self.detail else text


class CommTimeout(CommError):  # noqa: N818 - part of the published interface
    """The peer did not arrive within the bound: it is late, dead, or never issued this collective."""

    summary = "timed out"


class CommMismatch(CommError):  # noqa: N818
    """The peer arrived with another collective: the pair issued different operations, sizes or orders."""

    summary = "mismatched collective"


class CommAborted(CommError):  # noqa: N818
    """The edge was aborted, or an earlier failure left it unusable until ``reset``."""

    summary = "aborted"
