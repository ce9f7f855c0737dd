"""One part in a process of its own: ``python -m benchmarks.gpu.part MODULE:FUNCTION SPEC``."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
import traceback

from benchmarks.gpu.job import Job, Spec

_LOOK_EVERY_S = 0.5


def main(argv: list[str]) -> int:
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, _, function = argv[0].partition(":")
    job = Job(Spec.from_json(argv[1]))
    try:
        getattr(importlib.import_module(module), function)(job)
    except Exception as error:
        traceback.print_exc()
        job.broken(error)
        return 1
    return 0


def _end_with(runner: int) -> None:
    """A runner that is killed outright cannot end its parts."""
    while os.getppid() == runner:
        time.sleep(_LOOK_EVERY_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
