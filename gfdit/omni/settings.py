"""gfdit's own settings: ``additional_config={"gfdit": {...}}`` of a vLLM-Omni stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gfdit.core.policy_loading import load_policy


@dataclass(frozen=True, slots=True)
class Settings:
    """``ranks`` defaults to the stage's data-parallel size. Times in seconds, sizes in pixels.

    ``mask_sp_padding`` keeps images independent of the layouts they were made under when a length does not
    divide by the degree; without it vLLM-Omni attends to a few padding tokens. ``warmup_size`` is the side of
    the image that every rank and degree is warmed up with; 0 skips it.
    """

    policy: str = "equipartition"
    policy_args: dict[str, str] = field(default_factory=dict)
    ranks: int | None = None
    costs: str | None = None
    timeline: str | None = None
    mask_sp_padding: bool = True
    warmup_size: int | None = None
    comm_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    threads_per_rank: int | None = None

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> Settings:
        """Raises ``ValueError`` naming an unknown setting, policy or policy argument and what is known."""
        given = (additional_config or {}).get("gfdit") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f'additional_config["gfdit"] must be an object, got {given!r}')
        known = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"gfdit has no setting {unknown[0]!r}, known: {', '.join(known)}")
        values = dict(given)
        values["policy_args"] = {name: str(value) for name, value in (given.get("policy_args") or {}).items()}
        settings = cls(**values)
        ranks = settings.ranks
        if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise ValueError(f"gfdit setting 'ranks' must be a positive integer, got {ranks!r}")
        load_policy(settings.policy, settings.policy_args)
        return settings
