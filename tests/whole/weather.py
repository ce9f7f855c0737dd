"""What goes wrong in one simulated run, drawn from its seed: every run has a mixture of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gfdit.core import Policy
from gfdit.policies.edf import Edf
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.rssp import Rssp
from gfdit.policies.srtf import Srtf
from gfdit.policies.tetriserve import TetriServe
from gfdit.policies.triage import Triage

POLICIES = (RandomLayout, Equipartition, Fcfs, Srtf, Edf, Rssp, TetriServe, Triage)


@dataclass(frozen=True, slots=True)
class Weather:
    """Faults per second of simulated time, and probabilities per event; times in seconds."""

    deaths_per_s: float
    hangs_per_s: float
    cancel_storms_per_s: float
    clock_jumps_per_s: float
    task_error: float
    copy_error: float
    spurious_echo: float
    duplicate: float
    slow_rank: float
    longest_delay_s: float
    longest_detection_s: float
    longest_restart_s: float
    longest_lag_s: float  # of a migration lane

    @classmethod
    def draw(cls, draw: random.Random) -> Weather:
        """Each kind of fault is absent in about every third run, so that the others show alone, too."""

        def perhaps(most: float) -> float:
            return draw.random() * most if draw.random() < 0.65 else 0.0

        return cls(
            deaths_per_s=perhaps(0.5),
            hangs_per_s=perhaps(0.2),
            cancel_storms_per_s=perhaps(0.1),
            clock_jumps_per_s=perhaps(0.2),
            task_error=perhaps(0.03),
            copy_error=perhaps(0.02),
            spurious_echo=perhaps(0.03),
            duplicate=perhaps(0.1),
            slow_rank=perhaps(0.5),
            longest_delay_s=draw.choice([0.0, 0.001, 0.1, 3.0]),
            longest_detection_s=draw.choice([0.0, 0.1, 5.0]),
            longest_restart_s=draw.choice([0.1, 5.0, 40.0]),
            longest_lag_s=draw.choice([0.001, 0.5, 20.0]),
        )


def draw_policy(draw: random.Random) -> Policy:
    kind = draw.choice(POLICIES)
    return kind()
