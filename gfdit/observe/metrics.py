"""Prometheus metrics of a server, in its ``/metrics`` beside vLLM-Omni's. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

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


_TEMPLATE_BYTES = Gauge(
    "gfdit_template_bytes",
    "Bytes kept of templates by this server and those that share its folder",
    ["tier"],
    multiprocess_mode="livemostrecent",
)
_TEMPLATE_EVENTS = Gauge(
    "gfdit_template_events",
    "Since a rank's process began: passes read (hits, misses), units kept, refused, damaged, loaded from disk and "
    "saved to it with their bytes and seconds, templates evicted",
    ["rank", "event"],
    multiprocess_mode="livemostrecent",
)


def show_templates(by_rank: Sequence[Mapping[str, float]]) -> None:
    """Counters of a :class:`gfdit.templates.TemplateStore`, by rank."""
    for rank, counters in enumerate(by_rank):
        for name, value in counters.items():
            if name in ("host_bytes", "disk_bytes"):
                _TEMPLATE_BYTES.labels(name.removesuffix("_bytes")).set(value)
            else:
                _TEMPLATE_EVENTS.labels(str(rank), name).set(value)
