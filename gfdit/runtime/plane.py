"""The control plane that a configuration asks for, and the recording that says how to make the same one again."""

from __future__ import annotations

from gfdit.core import ControlPlane, RankRecord
from gfdit.core.cost.table import CostTable, NominalCostModel, TableCostModel
from gfdit.core.policy.loading import load_policy
from gfdit.observe.recording import RecordingHeader, RecordingWriter
from gfdit.runtime.config import RuntimeConfig
from gfdit.runtime.policy_guard import GuardedPolicy


def make_plane(config: RuntimeConfig, costs: CostTable | None) -> ControlPlane:
    """Without ``costs`` times are nominal. Raises ``ValueError`` for a policy that cannot be loaded."""
    policy = load_policy(config.policy, config.policy_args, config.admission)
    return ControlPlane(
        GuardedPolicy(policy, config.policy_timeout_s),
        [RankRecord(rank, frozenset({config.model})) for rank in range(config.num_ranks)],
        NominalCostModel() if costs is None else TableCostModel(costs),
        run_ahead=config.run_ahead,
        max_retries=config.max_retries,
        checkpoint_every_steps=config.checkpoint_every_steps,
        max_artifact_bytes=config.max_artifact_bytes,
    )


def open_recording(config: RuntimeConfig, costs: CostTable | None) -> RecordingWriter | None:
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
    )
    return RecordingWriter(config.record_path, header)
