"""The ways in which kernels carry out an exchange (all-gather, all-to-all, barrier), one function each.

Each prepares whatever does not depend on the tensors, once. Which one is taken is up to ``gfdit.comm.selector``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gfdit.comm.choice import Path, Site, Situation
from gfdit.comm.copy_engine import copy_engine, copy_engine_obstacle
from gfdit.comm.even import EvenParts
from gfdit.comm.exchange import Exchange
from gfdit.comm.heap import Operation
from gfdit.comm.layout import MAX_PROGRAMS
from gfdit.kernels import barrier as barrier_kernel
from gfdit.kernels import direct_exchange, low_latency_exchange, multicast_all_gather, push_exchange
from gfdit.kernels.tma_copy import launch_with_workspace

Run = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Enqueues an exchange, given its label and the contiguous source and target."""


def barrier(exchange: Exchange) -> Run:
    launch = barrier_kernel.plan(exchange.members)
    return lambda label, source, target: launch(label)


def barrier_obstacle(situation: Situation, site: Site) -> str | None:
    return None if situation.operation is Operation.BARRIER else "it moves no bytes"


def low_latency(exchange: Exchange) -> Run:
    return _by_address(
        low_latency_exchange.plan(
            exchange.members,
            exchange.even or EvenParts(0, 0, 0),
            alignment=exchange.alignment,
            num_programs=exchange.choice.num_programs,
        )
    )


def _by_address(launch: Callable[[int, int, int], None]) -> Run:
    return lambda label, source, target: launch(label, source.data_ptr(), target.data_ptr())


def low_latency_obstacle(situation: Situation, site: Site) -> str | None:
    if situation.num_bytes is None:
        return "only some members know how much the others exchange"
    most = site.layout.low_latency_bytes
    return None if situation.num_bytes <= most else f"the heap's low-latency slots take {most} bytes"


def push(exchange: Exchange) -> Run:
    return _push(exchange, tma=False)


def tma(exchange: Exchange) -> Run:
    """By words where tiles cannot be: peers cannot tell."""
    run, workspace = _push(exchange, tma=True), exchange.state.workspace
    return lambda label, source, target: launch_with_workspace(workspace, lambda: run(label, source, target))


def is_hopper(site: Site) -> bool:
    """On Hopper and later, and in the interpreter."""
    return not 0 < site.capability < 90


def tma_obstacle(situation: Situation, site: Site) -> str | None:
    return None if is_hopper(site) else f"it needs compute capability 9.0, this is {site.capability / 10:.1f}"


def _push(exchange: Exchange, tma: bool) -> Run:
    return _by_address(
        push_exchange.plan(
            exchange.members,
            exchange.even or EvenParts(0, 0, 0),
            alignment=exchange.alignment,
            chunk_bytes=exchange.choice.chunk_bytes,
            num_programs=exchange.choice.num_programs,
            tma=tma,
        )
    )


def direct_pull(exchange: Exchange) -> Run:
    return _direct(exchange, pull=True)


def direct_push(exchange: Exchange) -> Run:
    return _direct(exchange, pull=False)


def _direct(exchange: Exchange, pull: bool) -> Run:
    return _by_address(
        direct_exchange.plan(
            exchange.members,
            exchange.even or EvenParts(0, 0, 0),
            pull=pull,
            alignment=exchange.alignment,
            num_programs=exchange.choice.num_programs,
        )
    )


def multicast(exchange: Exchange) -> Run:
    num_bytes = exchange.call.num_bytes
    assert num_bytes is not None  # every member gathers as much
    return _by_address(
        multicast_all_gather.plan(exchange.members, num_bytes, num_programs=exchange.choice.num_programs)
    )


def multicast_obstacle(situation: Situation, site: Site) -> str | None:
    if situation.operation not in (Operation.ALL_GATHER, Operation.BROADCAST):
        return "not everybody gets the same"
    if site.capability and not site.has_multicast:
        return "the hardware has no multicast"
    needed = MAX_PROGRAMS * 16  # 16 bytes for each program
    if site.layout.multicast_bytes < needed:
        return f"it needs {needed} multicast_bytes, the heap has {site.layout.multicast_bytes}"
    return None


def _no_obstacle(situation: Situation, site: Site) -> str | None:
    return None


def _source_obstacle(situation: Situation, site: Site) -> str | None:
    return None if situation.source_in_heap else "the input is not a heap tensor"


def _target_obstacle(situation: Situation, site: Site) -> str | None:
    return None if situation.target_in_heap else "the output is not a heap tensor"


@dataclass(frozen=True, slots=True)
class ExchangePath:
    """``obstacle`` says why the path cannot serve a situation at a site; None if it can."""

    plan: Callable[[Exchange], Run]
    obstacle: Callable[[Situation, Site], str | None]


PATHS: Mapping[Path, ExchangePath] = {
    Path.BARRIER: ExchangePath(barrier, barrier_obstacle),
    Path.LOW_LATENCY: ExchangePath(low_latency, low_latency_obstacle),
    Path.PUSH: ExchangePath(push, _no_obstacle),
    Path.DIRECT_PULL: ExchangePath(direct_pull, _source_obstacle),
    Path.DIRECT_PUSH: ExchangePath(direct_push, _target_obstacle),
    Path.TMA: ExchangePath(tma, tma_obstacle),
    Path.COPY_ENGINE: ExchangePath(copy_engine, copy_engine_obstacle),
    Path.MULTICAST: ExchangePath(multicast, multicast_obstacle),
}
