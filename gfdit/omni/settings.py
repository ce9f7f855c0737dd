"""gfdit's own settings: ``additional_config={"gfdit": {...}}`` of a vLLM-Omni stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from gfdit.core.policy.loading import DEFAULT_POLICY, load_policy


@dataclass(frozen=True, slots=True)
class Settings:
    """``ranks`` defaults to the stage's data-parallel size. Times in seconds, sizes in pixels.

    ``comm_table`` is a file of ``gfdit bench comm --save``, by which kernels choose how to move data.
    ``adapter`` is ``module:Class`` of an adapter to use instead of the pipeline's own. ``model_name`` is what cost
    tables and policies call the model. ``record`` is a file for every event and command of the control plane.

    ``run_ahead`` 1 lets a request's next step be queued behind the running one, where the policy agrees.

    ``ring`` also offers sequence-parallel degrees that do not divide the model's attention heads.

    ``mask_sp_padding`` keeps images independent of the layouts they were made under when a length does not
    divide by the degree; without it vLLM-Omni attends to a few padding tokens. ``warmup_size`` is the side of
    the image that every rank and degree is warmed up with; 0 skips it. ``max_pixels`` of a frame and
    ``max_video_pixels`` of all frames turn away what would only exhaust the memory of a rank, and take every other
    request with it. ``max_artifact_bytes`` is what the
    artifacts of a rank may take: requests wait until there is room. ``max_requests`` are alive at once at most,
    others are turned away (HTTP 429).

    A worker that ends, is silent for ``heartbeat_timeout_s`` or is at one task for longer than ``task_timeout_s``
    and than 20 times what it should take is replaced, but not after ``max_restarts`` in a row that never became
    ready. Of each request at most ``max_retries`` steps that were lost with a worker run
    again; then it fails (HTTP 503). When the server is told to stop, what runs has ``shutdown_timeout_s`` to end.
    Every ``checkpoint_every_steps`` steps, unless 0, the state of a request on a
    single rank is copied to another rank.
    """

    policy: str = DEFAULT_POLICY
    policy_args: dict[str, str] = field(default_factory=dict)
    admission: str = "none"
    ranks: int | None = None
    adapter: str | None = None
    model_name: str | None = None
    costs: str | None = None
    timeline: str | None = None
    record: str | None = None
    comm_table: str | None = None
    ring: bool = False
    mask_sp_padding: bool = True
    warmup_size: int | None = None
    max_pixels: int = 4096 * 4096
    max_video_pixels: int = 1280 * 720 * 161
    run_ahead: int = 1
    max_artifact_bytes: int | None = None
    max_requests: int = 1024
    max_retries: int = 3
    checkpoint_every_steps: int = 0
    max_restarts: int = 3
    heartbeat_timeout_s: float = 10.0
    task_timeout_s: float = 60.0
    policy_timeout_s: float = 5.0
    comm_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 20.0
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
        policy_args = given.get("policy_args") or {}
        values = {**given, "policy_args": {name: str(value) for name, value in policy_args.items()}}
        try:
            settings = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"gfdit settings: {error}") from error
        if settings.run_ahead not in (0, 1):
            raise ValueError(f"gfdit setting 'run_ahead' must be 0 or 1, got {settings.run_ahead}")
        for name in ("max_retries", "max_restarts", "checkpoint_every_steps", "shutdown_timeout_s"):
            if (count := getattr(settings, name)) < 0:
                raise ValueError(f"gfdit setting {name!r} must not be negative, got {count}")
        for name in ("heartbeat_timeout_s", "task_timeout_s"):
            if (seconds := getattr(settings, name)) <= 0:
                raise ValueError(f"gfdit setting {name!r} must be positive, got {seconds}")
        for name in ("ranks", "max_artifact_bytes", "max_requests"):
            if (value := getattr(settings, name)) is not None and value < 1:
                raise ValueError(f"gfdit setting {name!r} must be at least 1, got {value}")
        load_policy(settings.policy, settings.policy_args, settings.admission)
        return settings

    def name_of(self, model: str) -> str:
        """What to call ``model``: a checkpoint folder by its own name, a hub name as it is."""
        if self.model_name:
            return self.model_name
        folder = Path(model).expanduser()
        return folder.resolve().name if folder.is_dir() else model
