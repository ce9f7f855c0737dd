"""The Triton interpreter, made fast enough for thousands of collectives. Import it in a rank process, once."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

# Triton decides when it is imported whether it compiles or interprets.
assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1"
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function called by another: the language is patched already (every call would do it again)."""
    return self.rewrite()(*args, **kwargs)


# For good, and for both names under which device functions see the language.
_everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
interpreter._patch_lang(_everything)
interpreter.InterpretedFunction.__call__ = _call
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


_rmw = interpreter.InterpreterBuilder.create_atomic_rmw


def _polling_rmw(self: Any, operation: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """A rank that waits gives its core to those it waits for: there are fewer cores than ranks."""
    if operation == _ADD and sem in _POLLS:
        time.sleep(_POLL_S)
    return _rmw(self, operation, ptr, value, mask, sem, scope)


_POLL_S = 5e-5
_ADD = interpreter._ir.ATOMIC_OP.ADD
_POLLS = (interpreter._ir.MEM_SEMANTIC.ACQUIRE, interpreter._ir.MEM_SEMANTIC.RELAXED)
interpreter.InterpreterBuilder.create_atomic_rmw = _polling_rmw
