"""Imported once by the process that CPU workers are forked from; must not start threads or touch tensors."""

import gc

# What is imported stays: to look through it for garbage again and again takes a fifth of the time of the imports.
gc.disable()

from vllm_omni.plugins import load_omni_general_plugins  # noqa: E402

import gfdit.omni.engine  # noqa: E402
import gfdit.omni.executor  # noqa: E402, F401

load_omni_general_plugins()

# A worker that collects garbage leaves alone what was imported here: looking at it would copy every page of it,
# which takes most of the time a worker needs to start.
gc.freeze()
gc.enable()
