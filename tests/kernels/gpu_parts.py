"""Parts that behave in every way a part may: what becomes of them is tested in ``test_gpu_check``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.job import Job


def works(job: Job) -> None:
    job.check("one", lambda: "fine")
    job.row(what="a thing", figure=1.5)
    job.note("and a word")


def raises(job: Job) -> None:
    job.check("before", lambda: "fine")
    job.check("divides", lambda: str(1 // 0))
    job.check("after", lambda: "fine")


def raises_outside(job: Job) -> None:
    job.check("before", lambda: "fine")
    raise KeyError("no such thing")


def dies(job: Job) -> None:
    job.check("before", lambda: "fine")
    job.check("crashes", _kill_self)
    job.check("after", lambda: "fine")


def _kill_self() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def hangs(job: Job) -> None:
    """Notices its limit itself, and says where it was."""
    job.note(f"process {os.getpid()}")
    job.check("before", lambda: "fine")
    job.check("waits", _wait)


def _wait() -> str:
    while True:
        time.sleep(0.01)


def hangs_in_one_check(job: Job) -> None:
    job.check("waits", _wait, limit_s=0.5)
    job.check("after", lambda: "fine")


def hangs_hard(job: Job) -> None:
    """In C, with the interpreter's lock held: nothing in the process can notice."""
    job.check("before", lambda: "fine")
    job.check("stuck", lambda: str(ctypes.PyDLL(None).pause()))


def leaves_a_child(job: Job) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    job.note(f"child {child.pid}")
    job.check("one", lambda: "fine")


def cut_off(job: Job) -> None:
    """Its last line is not whole."""
    job.check("before", lambda: "fine")
    job._file.write('{"check": {"name": "ha')
    job._file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def too_much(job: Job) -> None:
    job.check("first", lambda: "fine")
    job._end = 0.0
    job.check("second", lambda: "fine")


def nothing(job: Job) -> None:
    pass
