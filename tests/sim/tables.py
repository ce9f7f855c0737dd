"""Cost tables with round times, and traces, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gfdit.core import TaskKind
from gfdit.core.cost.file import CostEntry, CostTable
from gfdit.sim.trace import TraceRequest

MIGRATION_S = 0.25
ENCODE_S, PREPARE_S, DECODE_S = 0.5, 0.25, 1.0
AROUND_S = ENCODE_S + PREPARE_S + DECODE_S
STEP_S = {1: 2.0, 2: 1.25, 4: 0.75}  # by sp


def table(
    step_s: Mapping[int, float] = STEP_S,
    *,
    model: str = "m",
    prepare: bool = True,
    decode_s: Mapping[int, float] = MappingProxyType({1: DECODE_S}),
) -> CostTable:
    def entry(kind: TaskKind, sp: int, seconds: float) -> CostEntry:
        return CostEntry(model, kind, 512, 512, 1, False, sp, 1, 1, seconds)

    entries = [entry(TaskKind.ENCODE, 1, ENCODE_S)]
    entries += [entry(TaskKind.DECODE, sp, seconds) for sp, seconds in decode_s.items()]
    entries += [entry(TaskKind.PREPARE, 1, PREPARE_S)] if prepare else []
    entries += [entry(TaskKind.DENOISE, sp, seconds) for sp, seconds in step_s.items()]
    return CostTable("none", "made up", MIGRATION_S, 1e9, tuple(entries))


def line(request_id: str, arrival_s: float = 0.0, *, num_steps: int = 2, **changes: Any) -> TraceRequest:
    return replace(TraceRequest(request_id, arrival_s, "m", 512, 512, 1, num_steps), **changes)
