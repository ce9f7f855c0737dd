"""What of a template is kept when not all of it may be: which steps, and how exactly."""

from __future__ import annotations

from typing import Literal

#: How values are stored: in the dtype that they have, or float8 e4m3 with a scale per block, for K and for V.
Precision = Literal["as is", "fp8"]


def plan_budget(
    num_steps: int, step_bytes: int, fp8_step_bytes: int, budget_bytes: int, *, may_round: bool = True
) -> dict[int, Precision]:
    """Steps to keep and how, within ``budget_bytes``; steps that are not in it are computed in full.

    ``step_bytes`` and ``fp8_step_bytes`` are those of all heads and branches of one step. All steps as they are if
    that fits; else in fp8, unless ``may_round`` forbids it, whose error is small beside that of reuse itself;
    else the first steps only, since the last ones are those that gain most from being computed in full. (FlashPS
    §4.2 keeps all or nothing of a template.)

    Raises ``ValueError`` for sizes that are not positive and for a negative budget.
    """
    for name, value in {
        "num_steps": num_steps,
        "step_bytes": step_bytes,
        "fp8_step_bytes": fp8_step_bytes,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes must not be negative: {budget_bytes}")
    rounding = may_round and fp8_step_bytes < step_bytes and num_steps * step_bytes > budget_bytes
    precision: Precision = "fp8" if rounding else "as is"
    num_kept = min(num_steps, budget_bytes // (fp8_step_bytes if rounding else step_bytes))
    return dict.fromkeys(range(num_kept), precision)
