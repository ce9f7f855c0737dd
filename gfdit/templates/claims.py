"""Who records which pass of a template: advice, so that two ranks do not do the same work."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gfdit.templates.keys import TemplateKey
from gfdit.templates.locks import FileLock


class Claim:
    """That a pass is recorded here, until :meth:`close` or until the process ends, however it ends."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._path, self._lock = path, lock

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._lock.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordingClaims:
    """Of all processes that share ``folder``, a locked file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):  # of processes that were killed
                if (lock := FileLock.take(folder / name, create=False)) is not None:
                    Claim(folder / name, lock).close()

    def claim(self, template: TemplateKey, step: int, branch: int) -> Claim | None:
        """None if another has it, and where no files can be made."""
        path = self._folder / f"{template}-{step}-{branch}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock.take(path)
        except OSError:
            return None
        return None if lock is None else Claim(path, lock)
