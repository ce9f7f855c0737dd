"""Workflows of many models in one pool of ranks (LegoDiffusion paper, section 4).

Pure Python: a workflow can be read, checked and drawn where no model can be loaded.
"""

from gfdit.workflow.model import (
    Condition,
    Embeddings,
    Image,
    Latents,
    Model,
    Patch,
    Residuals,
)
from gfdit.workflow.recording import Workflow, WorkflowError, workflow

__all__ = [
    "Condition",
    "Embeddings",
    "Image",
    "Latents",
    "Model",
    "Patch",
    "Residuals",
    "Workflow",
    "WorkflowError",
    "workflow",
]
