"""Imported once by the process that CPU workers are forked from; must not start threads or touch tensors."""

import gc

import gfdit.omni.engine
import gfdit.omni.executor  # noqa: F401

# A worker that collects garbage leaves alone what was imported here: looking at it would copy every page of it,
# which takes most of the time a worker needs to start.
gc.freeze()
