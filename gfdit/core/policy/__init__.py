"""The interface of a scheduling policy, and what is around it: rules, admission, estimates, loading."""

from gfdit.core.policy.interface import (
    Admission,
    Decision,
    Dispatch,
    Policy,
    PolicyError,
    RankView,
    RequestView,
    SchedulerView,
    TaskView,
    batch_view,
)

__all__ = [
    "Admission",
    "Decision",
    "Dispatch",
    "Policy",
    "PolicyError",
    "RankView",
    "RequestView",
    "SchedulerView",
    "TaskView",
    "batch_view",
]
