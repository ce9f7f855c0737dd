"""Imported once by the process that CPU workers are forked from; must not start threads or touch tensors."""

import gfdit.omni.engine
import gfdit.omni.executor  # noqa: F401
