"""One tier of the store: a folder of units whose bytes are bounded, for all processes of a host together.

The file system is the only truth, so nothing can disagree with it and a process may die anywhere:

- A template is a folder, a unit a file in it that gets its name only when it is whole. A file that is being
  written has the size it will have, and its writer's lock: one without a lock was left behind, and is removed.
- ``.use`` in a template's folder was last changed when the template was last used. Who uses the template has a
  shared lock on it, who removes the template an exclusive one.
- ``.lock`` is held while bytes are counted and a file of a known size is made, while a file gets its name, and
  while a template is removed; never while a unit's bytes are written or read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.locks import FileLock, locked

_TEMPLATE = re.compile(r"[0-9a-f]{64}")
_UNIT = re.compile(r"(\d+)-(\d+)-(\d+)\.kv")
_USE, _LOCK, _UNFINISHED = ".use", ".lock", ".unfinished-"
#: A folder that was changed this recently may change again within the resolution of its time of change.
_SETTLED_NS = 1_000_000_000


class _Counted(NamedTuple):
    changed_ns: int
    num_bytes: int


class NewUnit:
    """A file of known size that is being written to ``fd``: a unit after :meth:`commit`, nothing without."""

    def __init__(self, folder: TierFolder, path: Path, fd: int, final: Path, use: FileLock | None) -> None:
        self.fd = fd
        self._folder, self._path, self._final, self._use = folder, path, final, use
        self._committed = False

    def commit(self) -> None:
        """The first of several writers wins: what has the name keeps it."""
        with self._folder.lock():
            if self._final.exists():
                self._path.unlink()
            else:
                self._path.rename(self._final)
            # Gone if the template was forgotten meanwhile.
            (self._final.parent / _USE).touch()
        self._committed = True

    def __enter__(self) -> NewUnit:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self.fd)
        if self._use is not None:
            self._use.close()


class TierFolder:
    """``root`` is made if need be. ``before_evicting`` is called with no lock held.

    Methods raise ``OSError`` as the file system does, and ``TimeoutError`` if the lock is not to be had.
    """

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        *,
        before_evicting: Callable[[TemplateKey], object] | None = None,
        lock_timeout_s: float = 30.0,
    ) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.num_evicted = 0
        self._before_evicting = before_evicting
        self._lock_timeout_s = lock_timeout_s
        self._counted: dict[str, _Counted] = {}
        root.mkdir(parents=True, exist_ok=True)
        with self.lock():
            self._count(afresh=True)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return locked(self.root / _LOCK, self._lock_timeout_s)

    def path(self, key: UnitKey) -> Path:
        return self.root / str(key.template) / f"{key.step}-{key.branch}-{key.head}.kv"

    def units(self, template: TemplateKey) -> set[UnitKey]:
        """Those that are there; one that is found damaged later counts until then."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = map(_UNIT.fullmatch, os.listdir(self.root / str(template)))
            return {UnitKey(template, *map(int, name.groups())) for name in found if name}
        return set()

    def use(self, template: TemplateKey) -> FileLock | None:
        """While it is held the template is not evicted. None if it is not here, or is just being removed."""
        path = self.root / str(template) / _USE
        try:
            lock = FileLock.take(path, shared=True, create=False)
        except NotADirectoryError:
            return None
        if lock is not None:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        return lock

    def mark_used(self, template: TemplateKey, used_ns: int) -> None:
        """It was last used then, not when its units were written."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.root / str(template) / _USE, ns=(used_ns, used_ns))

    def last_used_ns(self, template: TemplateKey) -> int:
        """Of the wall clock; 0 if it is not here."""
        with contextlib.suppress(FileNotFoundError):
            return (self.root / str(template) / _USE).stat().st_mtime_ns
        return 0

    def new(self, key: UnitKey, num_bytes: int) -> NewUnit | None:
        """Begin to write a unit; None where there is no room for it though all was evicted that is not in use.

        What was used longest ago goes first, a whole template at a time, but never the unit's own.
        """
        spared = {str(key.template)}
        while True:
            with self.lock():
                sizes = self._count()
                if sum(sizes.values()) + num_bytes > self.limit_bytes:
                    sizes = self._count(afresh=True)
                excess = sum(sizes.values()) + num_bytes - self.limit_bytes
                if excess <= 0:
                    return self._make(key, num_bytes)
                cold = {
                    name: size for name, size in sizes.items() if name not in spared and not self._in_use(name)
                }
            if sum(cold.values()) < excess:
                return None
            coldest = min(map(TemplateKey, cold), key=self.last_used_ns)
            if self._before_evicting is not None:
                self._before_evicting(coldest)
            self.num_evicted += self.drop(coldest)
            # Once is enough: what is still there is in use, or not the store's to remove.
            spared.add(str(coldest))

    def drop(self, template: TemplateKey, *, even_if_used: bool = False) -> bool:
        """Remove it; False if it is in use. Whoever has mapped its units keeps what it has mapped."""
        folder = self.root / str(template)
        with self.lock():
            if not folder.is_dir():
                return True
            use = FileLock.take(folder / _USE)
            if use is None and not even_if_used:
                return False
            for name in os.listdir(folder):
                if _UNIT.fullmatch(name):
                    (folder / name).unlink()
            _remove_leftovers(folder)
            (folder / _USE).unlink()
            with contextlib.suppress(OSError):  # a unit that is just being written
                folder.rmdir()
            if use is not None:
                use.close()
        return True

    def remove(self, key: UnitKey) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()

    def sizes(self) -> dict[str, int]:
        """Bytes by template, those of units that are being written included."""
        with self.lock():
            return self._count()

    def _make(self, key: UnitKey, num_bytes: int) -> NewUnit:
        folder = self.root / str(key.template)
        folder.mkdir(exist_ok=True)
        use = FileLock.take(folder / _USE, shared=True)
        os.utime(folder / _USE)
        path = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        fd = -1
        try:
            # Its lock, which tells that its writer lives, goes with the descriptor.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            FileLock.keep(fd)
            os.ftruncate(fd, num_bytes)
        except BaseException:
            if fd >= 0:
                os.close(fd)
                path.unlink()
            raise
        return NewUnit(self, path, fd, self.path(key), use)

    def _in_use(self, name: str) -> bool:
        path = self.root / name / _USE
        lock = FileLock.take(path, create=False)
        if lock is None:
            return path.exists()
        lock.close()
        return False

    def _count(self, *, afresh: bool = False) -> dict[str, int]:
        """Bytes by template. Folders that have not changed since are not read again, unless ``afresh``."""
        now_ns = time.time_ns()
        counted = {}
        for name in os.listdir(self.root):
            if not is_template(name):
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                folder = self.root / name
                if afresh:
                    _remove_leftovers(folder)
                changed_ns = folder.stat().st_mtime_ns
                known = self._counted.get(name)
                if afresh or known is None or known.changed_ns != changed_ns or changed_ns > now_ns - _SETTLED_NS:
                    known = _Counted(changed_ns, _bytes_in(folder))
                counted[name] = known
        self._counted = counted
        return {name: known.num_bytes for name, known in counted.items()}


def is_template(name: str) -> bool:
    """Whether a file name is that of a template, and not somebody else's."""
    return bool(_TEMPLATE.fullmatch(name))


def _bytes_in(folder: Path) -> int:
    def sizes() -> Iterator[int]:
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat().st_size

    return sum(sizes())


def _remove_leftovers(folder: Path) -> None:
    """Files whose writers are gone."""
    for name in os.listdir(folder):
        if name.startswith(_UNFINISHED) and (lock := FileLock.take(folder / name, create=False)) is not None:
            (folder / name).unlink()
            lock.close()
