"""Imported once by the process that CPU workers are forked from; must not start threads or touch tensors."""

import gc

# What is imported stays: to look through it for garbage again and again takes a fifth of the time of the imports.
gc.disable()

import gfdit.omni.engine  # noqa: E402
import gfdit.omni.executor  # noqa: E402, F401

# A worker that collects garbage leaves alone what was imported here: looking at it would copy every page of it,
# which takes most of the time a worker needs to start.
gc.freeze()
gc.enable()
