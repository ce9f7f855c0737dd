"""Whether a queued task runs, settled once for every rank of its group."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_BEGUN, _WITHDRAWN = "begun", "withdrawn"


class Claims:
    """The first claim decides: of a rank to begin the task, or of the control process to withdraw it.

    A group that disagrees waits for ever: of two ranks, one would be in a collective that the other never enters.
    Messages cannot settle it, since one rank may have begun before the word reaches another. A claim is the
    making of a symbolic link in a folder that all processes share: exactly one succeeds, it tells at once whose
    it was, nobody waits for anybody, and a process that stops or dies anywhere leaves nothing locked. It costs a
    system call, some microseconds on a memory file system.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)

    @classmethod
    def create(cls, folder: Path) -> Claims:
        """Make the folder, unless it is there."""
        folder.mkdir(exist_ok=True)
        return cls(folder)

    def begin(self, dispatch_id: int) -> bool:
        """Claim that the task runs. False if it was withdrawn before."""
        return self._claim(dispatch_id, _BEGUN) == _BEGUN

    def withdraw(self, dispatch_id: int) -> bool:
        """Claim that the task does not run. False if a rank began it before."""
        return self._claim(dispatch_id, _WITHDRAWN) == _WITHDRAWN

    def forget(self, dispatch_id: int) -> None:
        """To be called once no rank will ask any more."""
        with contextlib.suppress(FileNotFoundError):  # the folder goes when the server does
            os.unlink(self._path(dispatch_id))

    def forget_before(self, first_id: int) -> None:
        """What was claimed of dispatches with lower numbers is of the past."""
        for name in os.listdir(self._folder):
            if int(name) < first_id:
                self.forget(int(name))

    def _claim(self, dispatch_id: int, wish: str) -> str:
        path = self._path(dispatch_id)
        try:
            os.symlink(wish, path)
        except FileExistsError:
            return os.readlink(path)
        return wish

    def _path(self, dispatch_id: int) -> str:
        return f"{self._folder}/{dispatch_id}"
