"""Passes of the compiler: what a workflow is rewritten by, each a class with ``apply``."""

from gfdit.workflow.passes.approximate_cache import ApproximateCache
from gfdit.workflow.passes.asynchronous_lora import AsynchronousLora
from gfdit.workflow.passes.split import Split

__all__ = ["ApproximateCache", "AsynchronousLora", "Split"]
