"""What is kept of templates (images that many requests edit): keys and values, in host memory and on disk."""

from gfdit.templates.budget import plan_budget
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.rows import gather, scales_of
from gfdit.templates.store import Reading, TemplateStore, Tier
from gfdit.templates.units import Unit

__all__ = [
    "Reading",
    "TemplateKey",
    "TemplateStore",
    "Tier",
    "Unit",
    "UnitKey",
    "gather",
    "plan_budget",
    "scales_of",
]
