"""Pure scheduling core: tasks, artifacts, layouts, the policy interface and the control plane.

No torch, no sockets, no threads, no clock. Policies, the simulator and the online runtime all build on it.
"""

from gfdit.core.control import ControlPlane
from gfdit.core.control.records import RankRecord
from gfdit.core.cost import CostModel, UnknownCostError
from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.core.policy import (
    Admission,
    Decision,
    Dispatch,
    Policy,
    PolicyError,
    RankView,
    RequestView,
    SchedulerView,
    TaskView,
)
from gfdit.core.policy.changes import Changes, Queue, ReadyQueue
from gfdit.core.policy.estimates import Estimates, ServiceTimes
from gfdit.core.policy.ranks import FreeRanks, RankCounts
from gfdit.core.tasks import Request, Shape, Task, TaskGraph, TaskKind, trajectory

__all__ = [
    "Admission",
    "Changes",
    "ControlPlane",
    "CostModel",
    "Decision",
    "Dispatch",
    "Estimates",
    "ExecutionLayout",
    "FreeRanks",
    "ParallelSpec",
    "Policy",
    "PolicyError",
    "Queue",
    "RankCounts",
    "RankRecord",
    "RankView",
    "ReadyQueue",
    "Request",
    "RequestView",
    "SchedulerView",
    "ServiceTimes",
    "Shape",
    "Task",
    "TaskGraph",
    "TaskKind",
    "TaskView",
    "UnknownCostError",
    "trajectory",
]
