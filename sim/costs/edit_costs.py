"""What steps of edits under a mask take: the share of a full step, and where templates are.

An edit computes the tokens under its mask and loads keys and values of the others, recorded of its template,
while it computes (FlashPS, section 4.2).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from gfdit.core.cost.load_plan import leading_full_blocks, steady_step_s


class Tier(StrEnum):
    """Where what was recorded of a template is; ``ABSENT``: nothing was."""

    HOST = "host"
    DISK = "disk"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class EditCosts:
    """Of one model, shape and kind of machine.

    A full step has ``num_blocks`` blocks of ``block_full_s`` seconds; the rest of its time no mask makes less.
    Of all image tokens a block reads ``bytes_per_block``; those under the mask are not loaded. ``text_share`` of
    a step's tokens are text and always computed. ``num_buffers`` blocks are loaded ahead at most. Of
    ``template_bytes`` each, as many templates are in the host as ``host_bytes`` hold; ``recorded`` ones are
    there from the start, the last the longest. Raises ``ValueError`` for numbers out of range.
    """

    num_blocks: int
    block_full_s: float
    bytes_per_block: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    template_bytes: float
    host_bytes: float
    text_share: float = 0.0
    num_buffers: int = 32
    recorded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_full_s", "host_bytes_per_s", "disk_bytes_per_s", "template_bytes"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value}")
        for name in ("bytes_per_block", "host_bytes", "num_buffers"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a non-negative number, got {getattr(self, name)}")
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share must be from 0 to 1, got {self.text_share}")

    def percent(self, mask_ratio: float, tier: Tier) -> int:
        """Of a full step's blocks, the time that those of an edit take: computing, and loads that are not hidden.

        In whole percent, as the mask is: both rounded up. Once loads run ahead from one step to the next.
        """
        return 100 if tier is Tier.ABSENT else _percent(self, max(1, math.ceil(100 * mask_ratio - 1e-9)), tier)

    def block_s(self, mask_ratio: float, tier: Tier = Tier.HOST) -> tuple[float, float, float]:
        """Seconds of a block that reads what was recorded, of one that computes all, and of the first's loads."""
        rate = self.host_bytes_per_s if tier is Tier.HOST else self.disk_bytes_per_s
        computed = self.text_share + (1 - self.text_share) * mask_ratio
        return computed * self.block_full_s, self.block_full_s, self.bytes_per_block * (1 - mask_ratio) / rate


@lru_cache(1000)
def _percent(costs: EditCosts, mask_percent: int, tier: Tier) -> int:
    what = (costs.num_blocks, *costs.block_s(mask_percent / 100, tier), costs.num_buffers)
    step_s = steady_step_s(leading_full_blocks(*what), *what)
    share = step_s / (costs.num_blocks * costs.block_full_s)
    return min(100, math.ceil(100 * share - 1e-9))


class Templates:
    """Which templates the host holds: those used last (FlashPS, section 4.2); all others ever used are on disk.

    What an edit records, or reads from disk, the next one finds in the host: its arrival is when that counts,
    although it takes a while.
    """

    def __init__(self, costs: EditCosts) -> None:
        self._most = int(costs.host_bytes // costs.template_bytes)
        self._held: OrderedDict[str, None] = OrderedDict()  # the last used last
        self._known: set[str] = set()
        for name in reversed(costs.recorded):
            self.use(name)

    def use(self, name: str) -> Tier:
        """Where ``name`` is; from now on it is in the host, and what has to make room on disk."""
        tier = Tier.HOST if name in self._held else Tier.DISK if name in self._known else Tier.ABSENT
        self._known.add(name)
        self._held[name] = None
        self._held.move_to_end(name)
        if len(self._held) > self._most:
            self._held.popitem(last=False)
        return tier
