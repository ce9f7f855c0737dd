"""What rank processes of interpreted kernels have in common: imported once by a fork server, inherited by all."""

from __future__ import annotations

import importlib
import pkgutil

import gfdit.kernels
from tests.kernels.interpreter import interpreter

for _module in pkgutil.iter_modules(gfdit.kernels.__path__, "gfdit.kernels."):
    for _value in list(vars(importlib.import_module(_module.name)).values()):
        if isinstance(_value, interpreter.InterpretedFunction):
            _value.rewrite()
