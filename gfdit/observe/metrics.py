"""Prometheus metrics of a server, in its ``/metrics`` beside vLLM-Omni's. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Container, Sequence

from prometheus_client import Gauge

_ARTIFACT_BYTES = Gauge(
    "gfdit_artifact_bytes",
    "Bytes of request state between trajectory tasks that a rank holds",
    ["rank"],
    multiprocess_mode="livemostrecent",
)

_RANK_UP = Gauge("gfdit_rank_up", "1 while a rank serves", ["rank"], multiprocess_mode="livemostrecent")


def show_ranks(num_ranks: int, serving: Container[int]) -> None:
    """Which ranks serve now."""
    for rank in range(num_ranks):
        _RANK_UP.labels(str(rank)).set(rank in serving)


def show_artifact_bytes(by_rank: Sequence[int]) -> None:
    """What each rank holds now, by rank."""
    for rank, num_bytes in enumerate(by_rank):
        _ARTIFACT_BYTES.labels(str(rank)).set(num_bytes)
