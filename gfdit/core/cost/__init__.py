"""What tasks take: the interface that policies ask, tables of times, and how measured times correct them."""

from gfdit.core.cost.model import CostModel, UnknownCostError

__all__ = ["CostModel", "UnknownCostError"]
