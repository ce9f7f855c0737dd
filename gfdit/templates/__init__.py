"""What is kept of templates (images that many requests edit): keys and values, in host memory and on disk."""

from gfdit.templates.budget import plan_budget, unit_bytes
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.rows import gather, pinned, scales_of
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
    "pinned",
    "plan_budget",
    "scales_of",
    "unit_bytes",
]
