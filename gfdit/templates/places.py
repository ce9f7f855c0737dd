"""A tier that may be out of order or full: one message for as long as that lasts, and a try now and then."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.tier_folder import TierFolder


class Outages:
    """Of one thing that may fail for a while: each outage is told once, by any thread."""

    def __init__(self, on_message: Callable[[str], None], retry_s: float) -> None:
        self._on_message, self._retry_s = on_message, retry_s
        self._lock = threading.Lock()
        self._told = False
        self._told_s = -math.inf
        self._retry_at_s = 0.0

    @property
    def lasts(self) -> bool:
        """True until it is time to try again."""
        return self._told and time.monotonic() < self._retry_at_s

    def begin(self, message: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            # What comes and goes is told no more often than it is tried.
            tell = not self._told and now_s >= self._told_s + self._retry_s
            self._told, self._retry_at_s = True, now_s + self._retry_s
            self._told_s = now_s if tell else self._told_s
        if tell:
            self._on_message(f"templates: {message}")

    def end(self) -> None:
        """It worked."""
        self._told = False


class Place:
    """Where a tier is, whether it can be used or not. ``else_`` says what becomes of templates without it."""

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        else_: str,
        on_message: Callable[[str], None],
        retry_s: float,
        before_evicting: Callable[[TemplateKey], object] | None = None,
    ) -> None:
        self.root = root
        self._limit_bytes, self._else, self._before_evicting = limit_bytes, else_, before_evicting
        self._broken, self._full = Outages(on_message, retry_s), Outages(on_message, retry_s)
        self._tier: TierFolder | None = None
        self.to_read()

    def to_read(self) -> TierFolder | None:
        """None while it cannot be opened at all."""
        if self._tier is None and not self._broken.lasts:
            with self.watched():
                self._tier = TierFolder(self.root, self._limit_bytes, before_evicting=self._before_evicting)
        return self._tier

    def to_write(self) -> TierFolder | None:
        """None, too, for a while after writing has failed."""
        tier = self.to_read()
        return None if self._broken.lasts else tier

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """An ``OSError`` within ends it, and is an outage."""
        try:
            yield
        except OSError as error:
            self._broken.begin(f"{self.root} cannot be used ({error.strerror or error}), so {self._else}")

    def is_full(self) -> None:
        self._full.begin(
            f"all {self._limit_bytes} bytes of {self.root} are taken by templates in use, so {self._else}"
        )

    def has_kept(self) -> None:
        """Something was written."""
        self._broken.end()
        self._full.end()

    def units(self, template: TemplateKey) -> set[UnitKey]:
        with contextlib.suppress(OSError):
            if (tier := self.to_read()) is not None:
                return tier.units(template)
        return set()

    def sizes(self) -> dict[str, int]:
        """Bytes by template."""
        with contextlib.suppress(OSError):
            if (tier := self.to_read()) is not None:
                return tier.sizes()
        return {}

    def last_used_ns(self, template: TemplateKey) -> int:
        return self._tier.last_used_ns(template) if self._tier is not None else 0

    def mark_used(self, template: TemplateKey, used_ns: int) -> None:
        if self._tier is not None:
            self._tier.mark_used(template, used_ns)

    @property
    def num_evicted(self) -> int:
        return self._tier.num_evicted if self._tier is not None else 0
