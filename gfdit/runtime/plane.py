"""The control plane that a configuration asks for, and the recording that says how to make the same one again."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from gfdit.core import ControlPlane, Policy, RankRecord
from gfdit.core.control.residency import Residency
from gfdit.core.cost import CostModel
from gfdit.core.cost.table import CostTable, cost_model
from gfdit.core.events import PolicyChoice
from gfdit.core.policy.fallback import FirstComeFirstServed
from gfdit.core.policy.loading import policy_maker
from gfdit.observe.recording import RecordingHeader, RecordingWriter
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.policy_guard import GuardedPolicy

Plane = TypeVar("Plane", bound=ControlPlane)


def make_plane(config: RuntimeConfig, costs: CostTable | None) -> ControlPlane:
    """Without ``costs`` times are nominal. Raises ``ValueError`` for a policy that cannot be loaded."""

    def load(choice: PolicyChoice) -> Policy:
        make = policy_maker(choice.policy, choice.args, choice.admission)
        return GuardedPolicy(make(), config.policy_timeout_s, config.policy_mark_path, make)

    make_cost = partial(cost_model, skips_steps=config.skips_steps)
    policy = FirstComeFirstServed(config.policy) if config.without_policy else load(choice_of(config))
    plane = plane_of(config, policy, make_cost(costs), ControlPlane)
    plane.load_policy, plane.make_cost = load, make_cost
    return plane


def choice_of(config: RuntimeConfig) -> PolicyChoice:
    return PolicyChoice(config.policy, config.policy_args, config.admission)


def plane_of(config: RuntimeConfig, policy: Policy, cost: CostModel, kind: type[Plane]) -> Plane:
    """One with these parts; ``kind`` is the control plane, or a subclass that looks on."""
    held = Residency(config.components, config.component_bytes)
    there = [held.initial(rank) if config.components else {config.model} for rank in range(config.num_ranks)]
    return kind(
        policy,
        [RankRecord(rank, frozenset(names)) for rank, names in enumerate(there)],
        cost,
        components=config.components,
        component_bytes=config.component_bytes,
        run_ahead=config.run_ahead,
        max_retries=config.max_retries,
        checkpoint_every_steps=config.checkpoint_every_steps,
        max_artifact_bytes=config.max_artifact_bytes,
        device_memory_bytes=config.device_memory_bytes,
        max_queue_s=config.max_queue_s,
        first_id=config.first_id,
        drained=config.drained,
    )


def open_recording(
    config: RuntimeConfig, costs: CostTable | None, *, from_start: bool = True
) -> RecordingWriter | None:
    """Without ``from_start`` of a control plane that has had events already."""
    if config.record_path is None:
        return None
    header = RecordingHeader(
        model=config.model,
        num_ranks=config.num_ranks,
        policy=config.policy,
        policy_args=config.policy_args,
        admission=config.admission,
        costs=costs,
        run_ahead=config.run_ahead,
        max_retries=config.max_retries,
        checkpoint_every_steps=config.checkpoint_every_steps,
        max_artifact_bytes=config.max_artifact_bytes,
        device_memory_bytes=config.device_memory_bytes,
        max_queue_s=config.max_queue_s,
        first_id=config.first_id,
        skips_steps=config.skips_steps,
        drained=config.drained,
        from_start=from_start,
    )
    return RecordingWriter(config.record_path, header)
