"""What an operator changes while a server runs: what may be, how it is checked, and that it is all or nothing.

:class:`Admin` is behind the routes of :mod:`gfdit.omni.http_operations`. It checks a change as a whole against
what is in force; then the engine's loop has the control process go on with it, between two of its events, and only
when that has said yes the rest is in force, too. A control process that replaces another begins with what is.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gfdit.core.cost.file import CostTable
from gfdit.core.json_fields import check_plain, one_line, shown
from gfdit.core.policy.loading import known_policies
from gfdit.observe.metrics import ServerMetrics
from gfdit.omni.settings import Settings

logger = logging.getLogger(__name__)

LIMITS = (
    "max_steps",
    "max_outputs",
    "max_pixels",
    "max_video_pixels",
    "max_payload_bytes",
    "max_queued_bytes",
    "max_requests",
    "max_queue_s",
    "max_retries",
    "checkpoint_every_steps",
)
"""Settings that may change under their own names."""
_OF_CONTROL = ("policy", "policy_args", "admission", "max_queue_s", "max_retries", "checkpoint_every_steps")
ANSWER_TIMEOUT_S = 600.0
"""Far longer than a control process may be silent, and another one take to be in its place."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call; what it leaves out stays as it is.

    A ``policy`` comes with its arguments, or has its defaults. ``costs`` is a cost table, as in its file, or null
    for nominal times. ``record`` and ``timeline`` switch the files on and off that the server was started with.
    Ranks in ``drain_ranks`` are given nothing any more, those in ``add_ranks`` are again; with ``drain`` the
    server takes no further requests.
    """

    policy: str | msgspec.UnsetType = msgspec.UNSET
    policy_args: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    admission: str | msgspec.UnsetType = msgspec.UNSET
    costs: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    limits: dict[str, Any] = {}
    record: bool | msgspec.UnsetType = msgspec.UNSET
    timeline: bool | msgspec.UnsetType = msgspec.UNSET
    drain_ranks: list[int] = []
    add_ranks: list[int] = []
    drain: bool | msgspec.UnsetType = msgspec.UNSET


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A change that was checked: ``settings`` for the engine, ``control`` for the configuration of the runtime."""

    settings: Settings
    control: dict[str, Any]


class Engine(Protocol):
    """What is changed."""

    settings: Settings
    metrics: ServerMetrics
    num_ranks: int

    def begin_change(self, step: Step) -> Future[None]:
        """Have it come into force; the future raises ``ValueError`` where it cannot, and nothing has changed."""


class Admin:
    """``model`` is what cost tables call the server's model, if it has one. To be used from any thread."""

    def __init__(self, engine: Engine, run_dir: Path, model: str | None) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._model = model
        self._at_start = engine.settings
        self._lock = threading.Lock()  # changes are made one after the other, each upon the one before
        self._drained: tuple[int, ...] = ()
        self._costs_path = engine.settings.costs
        self._records = engine.settings.record is not None
        self._draws = engine.settings.timeline is not None
        self._num_tables = 0

    def state(self) -> dict[str, Any]:
        """What is in force, under the names by which it is changed."""
        settings = self._engine.settings
        return {
            "policy": settings.policy,
            "policy_args": settings.policy_args,
            "admission": settings.admission,
            "costs": None if self._costs_path is None else CostTable.load(self._costs_path).source,
            "limits": {name: getattr(settings, name) for name in LIMITS},
            "record": self._at_start.record if self._records else None,
            "timeline": self._at_start.timeline if self._draws else None,
            "drained_ranks": list(self._drained),
            "drain": self._engine.metrics.draining,
            "policies": self._policies(),
        }

    def change(self, body: bytes) -> dict[str, Any]:
        """Have what ``body`` says come into force, and say what is then.

        Raises ``ValueError`` with a line for what cannot be: then nothing has changed. Takes as long as the
        control process takes to answer.
        """
        try:
            change = msgspec.json.decode(body, type=Change)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(one_line(error).replace("`", "")) from error
        for name, value in msgspec.structs.asdict(change).items():
            check_plain(value, name)
        with self._lock:
            self._make(change)
            return self.state()

    def _make(self, change: Change) -> None:
        settings, drained = self._settings_with(change), self._drained_with(change)
        control: dict[str, Any] = {name: getattr(settings, name) for name in _OF_CONTROL}
        control["drained"] = drained
        if change.policy is not msgspec.UNSET or change.policy_args is not msgspec.UNSET:
            control["without_policy"] = False
        records = self._switched(change.record, self._records, "record")
        draws = self._switched(change.timeline, self._draws, "timeline")
        control["record_path"] = self._at_start.record if records else None
        control["timeline_path"] = self._at_start.timeline if draws else None
        costs_path = self._costs_path if change.costs is msgspec.UNSET else self._write_costs(change.costs)
        control["costs_path"] = costs_path
        self._engine.begin_change(Step(settings, control)).result(ANSWER_TIMEOUT_S)
        self._drained, self._costs_path, self._records, self._draws = drained, costs_path, records, draws
        if change.drain is not msgspec.UNSET:
            self._engine.metrics.draining = change.drain
        told = {name: value for name, value in msgspec.structs.asdict(change).items() if name != "costs"}
        told |= {} if change.costs is msgspec.UNSET else {"costs": costs_path}
        said = {name: value for name, value in told.items() if value not in (msgspec.UNSET, [], {})}
        # So that it is in the log whatever that is set to.
        logger.warning("an operator has changed: %s", json.dumps(said))

    def _settings_with(self, change: Change) -> Settings:
        """Raises ``ValueError`` as at the start of a server."""
        if unknown := sorted(set(change.limits) - set(LIMITS)):
            known = ", ".join(LIMITS)
            raise ValueError(f"limit {shown(unknown[0])} cannot be changed while the server runs, known: {known}")
        named = (change.policy, change.policy_args, change.admission)
        if not change.limits and all(one is msgspec.UNSET for one in named):
            return self._engine.settings  # the policy need not be loaded again
        given = dataclasses.asdict(self._engine.settings) | change.limits
        if change.policy is not msgspec.UNSET:
            if change.policy not in (allowed := self._policies()):
                raise ValueError(
                    f"policy {shown(change.policy)} is neither installed nor that of the server's start, "
                    f"allowed: {', '.join(allowed)}"
                )
            given |= {"policy": change.policy, "policy_args": {}}
        if change.policy_args is not msgspec.UNSET:
            given["policy_args"] = change.policy_args
        if change.admission is not msgspec.UNSET:
            given["admission"] = change.admission
        return Settings.parse({"gfdit": given})

    def _policies(self) -> list[str]:
        """Files and modules are code: a client may not name others than whoever has started the server."""
        return sorted({*known_policies(), self._at_start.policy})

    def _drained_with(self, change: Change) -> tuple[int, ...]:
        drained = set(self._drained)
        for rank in (*change.drain_ranks, *change.add_ranks):
            if not 0 <= rank < self._engine.num_ranks:
                raise ValueError(f"there is no rank {rank}: the server has {self._engine.num_ranks}")
        for rank in change.drain_ranks:
            if rank in drained:
                raise ValueError(f"rank {rank} is drained already")
            drained.add(rank)
        for rank in change.add_ranks:
            if rank not in drained or rank in change.drain_ranks:
                raise ValueError(f"rank {rank} is not drained")
            drained.discard(rank)
        if change.drain_ranks:
            left = len(set(self._engine.metrics.ranks_up()) - drained)
            if left < max(1, least := self._engine.settings.min_sp):
                raise ValueError(f"{left} live ranks would be left, and at least {least} are needed")
        return tuple(sorted(drained))

    def _switched(self, wanted: bool | msgspec.UnsetType, now: bool, name: str) -> bool:
        if wanted is msgspec.UNSET:
            return now
        if wanted and getattr(self._at_start, name) is None:
            raise ValueError(f"the server was started without --{name} FILE, so there is no file to switch on")
        return wanted

    def _write_costs(self, costs: dict[str, Any] | None) -> str | None:
        """Where every control process finds them."""
        if costs is None:
            return None
        self._num_tables += 1
        path = self._run_dir / f"costs{self._num_tables}.json"
        path.write_text(json.dumps(costs))
        try:
            known = dict.fromkeys(entry.model for entry in CostTable.load(path).entries)
            if self._model is not None and self._model not in known:
                raise ValueError(f"{path} has no times of {self._model!r}, known: {', '.join(known)}")
        except ValueError as error:
            path.unlink()
            raise ValueError(str(error).replace(str(path), "costs")) from error
        return str(path)


class Running:
    """The engine of this process that was made last, if there is one, as operators reach it."""

    def __init__(self) -> None:
        self.admin: Admin | None = None


RUNNING = Running()
