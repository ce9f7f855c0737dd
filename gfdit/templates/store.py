"""Keys and values of templates' tokens, one store for all processes of a host: in shared memory, and on disk.

(FlashPS §4.2, "hierarchical storage", which keeps activations; here they are keys and values after norm and
rotary.) Templates that were not used for long go from the host to the disk, and from the disk for good. Anything
may be missing at any time: it is computed again.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gfdit.templates.budget import Precision
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.locks import FileLock
from gfdit.templates.places import Outages, Place
from gfdit.templates.tier_folder import TierFolder, is_template
from gfdit.templates.units import (
    PAGE_BYTES,
    DamagedError,
    Unit,
    check_crc,
    describe,
    map_unit,
    pack,
    prepare,
    write_all,
)

_CHUNK_BYTES = 4 << 20
_MAX_REMEMBERED = 1 << 17
_DESCRIPTION_BYTES = 1 << 16
_COUNTS = ("hits", "misses", "kept", "refused", "damaged", "loaded", "load_bytes", "load_seconds", "saved")
_logger = logging.getLogger(__name__)


class Tier(enum.Enum):
    """Where a template is: to be used at once, to be warmed up first, or to be recorded."""

    HOST = "host"
    DISK = "disk"
    ABSENT = "absent"


class TemplateInfo(NamedTuple):
    """``description`` is None if nobody has registered it; ``last_used_s`` since 1970, 0 for never."""

    description: dict[str, Any] | None
    host_bytes: int
    disk_bytes: int
    last_used_s: float


class TemplateStore:
    """A store that any number of processes open at once, each with the same folders and limits.

    Args:
        folder: Of the disk tier; None for none.
        shared: Of the host tier, on a file system in memory such as ``/dev/shm``.
        host_bytes: What all templates take in ``shared`` at most.
        disk_bytes: What they take in ``folder`` at most.
        on_message: Is told once, in a line, of what is wrong and of what it means; from any thread.
        retry_s: After which a tier that failed is tried again.
        num_loaders: Threads of this process that copy between tiers.

    Any thread may call any method. Nothing raises ``OSError``: a tier that fails is one message and otherwise as
    if it were empty and full.
    """

    def __init__(
        self,
        folder: Path | None,
        shared: Path,
        *,
        host_bytes: int,
        disk_bytes: int = 0,
        on_message: Callable[[str], None] = _logger.warning,
        retry_s: float = 60.0,
        num_loaders: int = 2,
    ) -> None:
        self._host = Place(
            shared,
            host_bytes,
            "edits of other templates are computed in full",
            on_message,
            retry_s,
            before_evicting=self._save_now if folder is not None else None,
        )
        self._disk = None
        if folder is not None:
            self._disk = Place(
                folder, disk_bytes, "templates that leave the host are recorded again", on_message, retry_s
            )
        self._unreadable = Outages(on_message, retry_s)
        self._on_message = on_message
        self._loaders = ThreadPoolExecutor(num_loaders, "gfdit-templates")
        self._copies: dict[tuple[str, TemplateKey], Future[bool]] = {}
        self._verified: set[tuple[int, int, int]] = set()
        self._counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Copies that have begun end first, others are left out; what is kept stays for the next to open."""
        self._loaders.shutdown(wait=True, cancel_futures=True)

    # What is kept

    def put(self, key: UnitKey, values: torch.Tensor, precision: Precision = "as is") -> bool:
        """Keep ``values``: (blocks, 2, tokens, head size), float32, bfloat16, float16 or float8 e4m3, any device.

        Returns when all processes can read them; until then none sees anything. False if there was no room, which
        is no failure. Where the unit is there already it stays as it is. For room, templates that were not used
        for long are moved to disk first, so this may take long: it is not for a rank's compute lane. Raises
        ``ValueError`` for other values.
        """
        kept = (tier := self._host.to_write()) is not None and self._put(tier, key, values, precision)
        self._count("kept" if kept else "refused")
        return kept

    def reading(self, template: TemplateKey) -> Reading:
        """Until it is closed the template stays on the host, if it is there."""
        return Reading(self, template)

    def has(self, template: TemplateKey, step: int, branch: int, heads: Iterable[int]) -> bool:
        """Whether all ``heads`` of a pass are kept, in whichever tier."""
        return {UnitKey(template, step, branch, head) for head in heads} <= set().union(*self._units(template))

    def missing(
        self, template: TemplateKey, steps: Iterable[int], num_branches: int, heads: Iterable[int]
    ) -> list[tuple[int, int]]:
        """Passes (step, branch) of which some head is in no tier, in order: what is to be recorded."""
        kept, wanted = set().union(*self._units(template)), frozenset(heads)
        passes = [(step, branch) for step in steps for branch in range(num_branches)]
        return [(s, b) for s, b in passes if not {UnitKey(template, s, b, head) for head in wanted} <= kept]

    def tier(self, template: TemplateKey, step: int | None = None) -> Tier:
        """``HOST`` if nothing of what is kept has to be loaded first, of one step or of all."""

        host, disk = (
            {key for key in units if step is None or key.step == step} for units in self._units(template)
        )
        if disk - host:
            return Tier.DISK
        return Tier.HOST if host else Tier.ABSENT

    # Between tiers

    def warm(self, template: TemplateKey) -> Future[bool]:
        """Begin to load from disk what the host lacks, first steps first; returns at once.

        The result is whether all of it could be loaded. To be called when a request is queued.
        """
        return self._in_background("warm", template, self._warm_now)

    def save(self, template: TemplateKey) -> Future[bool]:
        """Begin to copy to disk what the disk lacks, so that nobody waits for it later; returns at once.

        To be called when a template was recorded. What was not saved is when it leaves the host.
        """
        return self._in_background("save", template, self._save_now)

    def forget(self, template: TemplateKey) -> None:
        """Remove it from all tiers, even while it is read: readers keep what they have got."""
        for place in self._places():
            if (tier := place.to_read()) is not None:
                with place.watched():
                    tier.drop(template, even_if_used=True)
        with contextlib.suppress(OSError):
            self._description(template).unlink()

    # Which there are

    def register(self, template: TemplateKey, description: dict[str, Any]) -> None:
        """Remember what a template is, as JSON, also when nothing else of it is kept.

        Raises ``ValueError`` for what JSON cannot hold or what takes more than 64 KiB.
        """
        try:
            text = json.dumps(description)
        except TypeError as error:
            raise ValueError(f"the description of template {template} is no JSON: {error}") from None
        if len(text) > _DESCRIPTION_BYTES:
            raise ValueError(
                f"the description of template {template} has {len(text)} bytes, at most {_DESCRIPTION_BYTES}"
            )
        place = self._places()[-1]
        if (tier := place.to_write()) is not None:
            with place.watched(), tier.lock():
                draft = tier.root / ".draft"
                draft.write_text(text)
                draft.rename(self._description(template))

    def templates(self) -> dict[TemplateKey, TemplateInfo]:
        """Those that are registered and those of which something is kept."""
        host, disk = self._host.sizes(), self._disk.sizes() if self._disk is not None else {}
        registered = {path.stem for path in self._places()[-1].root.glob("*.json") if is_template(path.stem)}
        return {
            template: TemplateInfo(
                self._read_description(template),
                host.get(str(template), 0),
                disk.get(str(template), 0),
                max(place.last_used_ns(template) for place in self._places()) / 1e9,
            )
            for template in map(TemplateKey, sorted(registered | {*host, *disk}))
        }

    def counters(self) -> dict[str, float]:
        """Of this process since it opened the store; but ``host_bytes`` and ``disk_bytes`` are what is held now.

        Passes that were read: ``hits``, ``misses`` (:meth:`Reading.heads`). Units: ``kept``, ``refused``,
        ``damaged``, ``loaded`` from disk (in ``load_bytes`` and ``load_seconds``), ``saved`` to disk. Templates:
        ``host_evictions``, ``disk_evictions``.
        """
        with self._lock:
            counts = dict(self._counts)
        for name, place in zip(("host", "disk"), self._places(), strict=False):
            counts[f"{name}_bytes"] = sum(place.sizes().values())
            counts[f"{name}_evictions"] = place.num_evicted
        return counts

    # For readings

    def _map(self, key: UnitKey) -> Unit | None:
        if (tier := self._host.to_read()) is None:
            return None
        try:
            fd = os.open(tier.path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                unit = map_unit(fd, key, check=_identity(fd) not in self._verified)
                self._remember(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self._damaged(tier, key, error)
            return None
        except OSError as error:
            self._unreadable.begin(f"{tier.path(key)} cannot be read ({error.strerror}), so it is computed again")
            return None
        self._unreadable.end()
        return unit

    def _use(self, template: TemplateKey) -> FileLock | None:
        with contextlib.suppress(OSError):
            if (tier := self._host.to_read()) is not None:
                return tier.use(template)
        return None

    def _count(self, name: str, number: float = 1) -> None:
        with self._lock:
            self._counts[name] += number

    # Copies

    def _put(self, tier: TierFolder, key: UnitKey, values: torch.Tensor, precision: Precision) -> bool:
        if tier.path(key).exists():
            return True
        pieces = pack(key, prepare(values, precision))
        with self._host.watched():
            new = tier.new(key, sum(map(len, pieces)))
            if new is None:
                self._host.is_full()
                return False
            with new:
                write_all(new.fd, pieces)
                self._remember(new.fd)
                new.commit()
            self._host.has_kept()
            return True
        return False

    def _in_background(
        self, what: str, template: TemplateKey, copy: Callable[[TemplateKey], bool]
    ) -> Future[bool]:
        with self._lock:
            running = self._copies.get((what, template))
            if running is None:
                self._copies[what, template] = running = self._loaders.submit(copy, template)
                running.add_done_callback(lambda _: self._copies.pop((what, template), None))
        return running

    def _warm_now(self, template: TemplateKey) -> bool:
        begun_s = time.monotonic()
        if self._disk is not None:
            self._copy_all(template, self._disk, self._host, "load")
            self._count("load_seconds", time.monotonic() - begun_s)
        host, disk = self._units(template)
        return disk <= host

    def _save_now(self, template: TemplateKey) -> bool:
        if self._disk is not None:
            used_ns = self._host.last_used_ns(template)
            self._copy_all(template, self._host, self._disk, "save")
            for place in self._places():  # that it was copied is no use
                place.mark_used(template, used_ns)
        host, disk = self._units(template)
        return host <= disk

    def _copy_all(self, template: TemplateKey, source: Place, target: Place, what: str) -> None:
        """What ``target`` lacks, in order, as far as there is room."""
        from_, to = source.to_read(), target.to_write()
        if from_ is None or to is None:
            return
        in_use: set[TierFolder] = set()
        with target.watched(), contextlib.ExitStack() as uses:
            for key in sorted(from_.units(template) - to.units(template)):
                for tier in {from_, to} - in_use:
                    if (use := tier.use(template)) is not None:
                        uses.callback(use.close)
                        in_use.add(tier)
                try:
                    num_bytes = self._copy(key, from_, to)
                except DamagedError as error:
                    self._damaged(from_, key, error)
                    continue
                if num_bytes is None:
                    target.is_full()
                    break
                if num_bytes == 0:
                    continue
                target.has_kept()
                self._count("loaded" if what == "load" else "saved")
                if what == "load":
                    self._count("load_bytes", num_bytes)

    def _copy(self, key: UnitKey, source: TierFolder, target: TierFolder) -> int | None:
        """Its bytes, 0 if it has gone; None if there is no room.

        Raises ``DamagedError``, and ``OSError`` if it cannot be written or no more files can be opened.
        """
        with contextlib.ExitStack() as open_files:
            try:
                file = open_files.enter_context(source.path(key).open("rb", buffering=0))
            except FileNotFoundError:
                return 0
            num_bytes = os.fstat(file.fileno()).st_size
            described = describe(page := _read(file, PAGE_BYTES), key, num_bytes)
            new = target.new(key, num_bytes)
            if new is None:
                return None
            with new:
                crc = 0
                write_all(new.fd, [memoryview(page)])
                while chunk := _read(file, _CHUNK_BYTES):
                    crc = zlib.crc32(chunk, crc)
                    write_all(new.fd, [memoryview(chunk)])
                check_crc(crc, described)
                self._remember(new.fd)
                new.commit()
        return num_bytes

    def _damaged(self, tier: TierFolder, key: UnitKey, error: DamagedError) -> None:
        self._count("damaged")
        self._on_message(f"templates: {tier.path(key)} is damaged ({error}), so it is removed and computed again")
        with contextlib.suppress(OSError):
            tier.remove(key)

    def _remember(self, fd: int) -> None:
        """This process knows that the file's checksum is right."""
        if len(self._verified) >= _MAX_REMEMBERED:
            self._verified.clear()
        self._verified.add(_identity(fd))

    # Of all tiers

    def _places(self) -> list[Place]:
        return [self._host] if self._disk is None else [self._host, self._disk]

    def _units(self, template: TemplateKey) -> tuple[set[UnitKey], set[UnitKey]]:
        """On the host, on disk."""
        return self._host.units(template), set() if self._disk is None else self._disk.units(template)

    def _description(self, template: TemplateKey) -> Path:
        return self._places()[-1].root / f"{template}.json"

    def _read_description(self, template: TemplateKey) -> dict[str, Any] | None:
        """None where there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._description(template).read_bytes())
            return found if isinstance(found, dict) else None
        return None


class Reading:
    """A template in use: it is not evicted. What was got from it stays valid as long as its tensors live."""

    def __init__(self, store: TemplateStore, template: TemplateKey) -> None:
        self._store, self.template = store, template
        self._use = store._use(template)

    def get(self, step: int, branch: int, head: int) -> Unit | None:
        """In place, not copied; None if it is not on the host. A damaged one is removed, and never returned."""
        if self._use is None:  # it may have come since
            self._use = self._store._use(self.template)
        return None if self._use is None else self._store._map(UnitKey(self.template, step, branch, head))

    def heads(self, step: int, branch: int, heads: Iterable[int]) -> list[Unit] | None:
        """All ``heads`` of a pass, or None. Each unit holds an open file until its tensors are dropped."""
        units = []
        for head in heads:
            if (unit := self.get(step, branch, head)) is None:
                self._store._count("misses")
                return None
            units.append(unit)
        self._store._count("hits")
        return units

    def close(self) -> None:
        if self._use is not None:
            self._use.close()
            self._use = None

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _identity(fd: int) -> tuple[int, int, int]:
    """Of a file's contents, as long as nobody writes to it."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read(file: io.FileIO, num_bytes: int) -> bytes:
    """Raises ``DamagedError`` if the device cannot."""
    try:
        return file.read(num_bytes) or b""
    except OSError as error:
        raise DamagedError(error.strerror) from None
