"""How long collectives should take on machines that are not at hand: from compiled code and a model of the link.

What the code says is in ``docs/kernels.json``: how many bytes a program has on their way before it waits, and how
many instructions that takes it. What a machine says is in ``DEVICES``. The rest are a few durations, chosen so
that the smallest collective takes what others have published for theirs. Which path is taken, in which chunks, by
how many programs is up to the same selector as in serving.

It is a lower bound: nothing else runs, ranks begin together, and programs that use the memory are evenly mixed
with those that use the link, which is what kernels aim at. Writes the tables in ``docs/performance.md``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gfdit.comm.choice import Choice, Site, Situation  # noqa: E402 (needs the path above)
from gfdit.comm.choice import Path as Way  # noqa: E402
from gfdit.comm.exchange_paths import PATHS  # noqa: E402
from gfdit.comm.heap import Operation  # noqa: E402
from gfdit.comm.heap_descriptor import DEFAULT_LANES  # noqa: E402
from gfdit.comm.layout import SegmentLayout  # noqa: E402
from gfdit.comm.selector import Selector  # noqa: E402
from gfdit.comm.torch_symmetric_heap import DEVICE_SIZES  # noqa: E402

RECORD = ROOT / "docs" / "kernels.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"
SCHEDULERS = 4  # of a multiprocessor; each issues an instruction of one warp in a cycle

# Microseconds. A program starts and reads its counters, by loads that wait for each other.
START_US = 1.0
LOAD_US = 0.8  # from a load to its value, of memory that others use, too
HOP_US = 1.0  # from a store to its being seen by a peer that polls
FENCE_US = 1.0  # a release, after stores to a peer that have to be acknowledged first
FINISH_US = 0.5  # the last program advances the counters


class Device(NamedTuple):
    """Rates in GB/s: of the link in each direction as it is sold, and of the memory."""

    name: str
    capability: int
    line_rate: float
    memory_rate: float
    clock_ghz: float

    @property
    def link_rate(self) -> float:
        """What the payload of stores reaches: packets carry 128 bytes, and NCCL's authors give 20 of 25 GB/s."""
        return PAYLOAD * self.line_rate


PAYLOAD = 0.82
A100 = Device("A100", 80, 300, 2039, 1.41)
H100 = Device("H100", 90, 450, 3350, 1.755)
H200 = Device("H200", 90, 450, 4800, 1.755)
B200 = Device("B200", 100, 900, 8000, 1.85)
NVL72 = Device("GB200 NVL72", 100, 900, 8000, 1.85)
DEVICES = (H100, H200, B200, NVL72)


class Code(NamedTuple):
    """What a variant's copy loop does: see ``compile_kernels.Figures``."""

    flight_bytes: int
    turn_instructions: int
    num_warps: int

    def program_rate(self, device: Device, latency_us: float = LOAD_US) -> float:
        """GB/s of one program that nothing holds up: it waits for what it has loaded, then stores it."""
        issue_us = self.turn_instructions * self.num_warps / SCHEDULERS / (device.clock_ghz * 1e3)
        return self.flight_bytes / (latency_us + issue_us) / 1e3


class Expected(NamedTuple):
    """Of an exchange: ``sent_bytes`` by each rank to all others."""

    choice: Choice
    sent_bytes: int
    us: float

    def share_of(self, rate: float) -> float:
        """Of a rate in GB/s."""
        return self.sent_bytes / self.us / 1e3 / rate


class Model:
    """Of one device, with the default sizes of a heap of eight ranks."""

    def __init__(self, device: Device, record: dict | None = None) -> None:
        self.device = device
        self._variants = (record or json.loads(RECORD.read_text()))["variants"]
        layout = SegmentLayout(8, len(DEFAULT_LANES), **DEVICE_SIZES)
        self.site = Site(layout, device.name, device.capability, has_multicast=device.capability >= 90)
        self.selector = Selector(self.site, {path: kind.obstacle for path, kind in PATHS.items()})

    def expect(self, situation: Situation, choice: Choice | None = None) -> Expected:
        """Raises ValueError for a path without a model."""
        choice = choice or self.selector.choose(situation)
        assert situation.num_bytes is not None
        num_peers = situation.group_size - 1
        sent_bytes = situation.num_bytes * num_peers
        heads = situation.operation in (Operation.SCATTER_HEADS, Operation.GATHER_HEADS)
        if choice.path is Way.BARRIER:
            us = START_US + HOP_US + FINISH_US
        elif choice.path is Way.LOW_LATENCY:
            # Flags travel beside the data; programs pack what they load, and unpack what they have seen.
            us = START_US + 2 * LOAD_US + HOP_US + FINISH_US + 2 * sent_bytes / self.device.link_rate / 1e3
        elif choice.path in (Way.DIRECT_PUSH, Way.DIRECT_PULL):
            code = (
                self._code("ulysses_exchange", "DIRECT=True")
                if heads
                else self._code("direct_exchange", f"PULL={choice.path is Way.DIRECT_PULL}")
            )
            # What a remote load brings is on its way for two hops.
            latency_us = LOAD_US if choice.path is Way.DIRECT_PUSH else LOAD_US + HOP_US
            rate = choice.num_programs * code.program_rate(self.device, latency_us)
            # Half of the programs copy what stays on the rank while the others use the link.
            programs_us = (sent_bytes + situation.num_bytes) / rate / 1e3
            copy_us = max(sent_bytes / min(rate / 2, self.device.link_rate) / 1e3, programs_us)
            us = START_US + HOP_US + copy_us + FENCE_US + HOP_US + FINISH_US
        elif choice.path in (Way.PUSH, Way.TMA):
            constants = f"TMA={choice.path is Way.TMA}"
            code = (
                self._code("ulysses_exchange", "DIRECT=False") if heads else self._code("push_exchange", constants)
            )
            us = START_US + self._turns_us(code, situation, choice) + HOP_US + FINISH_US
        else:
            raise ValueError(f"no model of {choice.path}")
        return Expected(choice, sent_bytes, us)

    def _turns_us(self, code: Code, situation: Situation, choice: Choice) -> float:
        """Through data slots: a chunk to every peer, tokens behind them, and as much out of the own slots."""
        assert situation.num_bytes is not None
        num_peers, slot_bytes = situation.group_size - 1, self.site.layout.slot_bytes
        total_us, left_bytes, take_us = 0.0, situation.num_bytes, 0.0
        while left_bytes > 0:
            # A turn does not cross the end of a slot.
            turn_bytes = min(choice.chunk_bytes * choice.num_programs, left_bytes, slot_bytes)
            num_programs = math.ceil(turn_bytes / choice.chunk_bytes)
            link_us = turn_bytes * num_peers / self.device.link_rate / 1e3
            take_us = turn_bytes * num_peers / num_programs / code.program_rate(self.device) / 1e3
            # A program alone: it puts, waits for the release, and takes as much.
            total_us += max(link_us, 2 * take_us + FENCE_US)
            left_bytes -= turn_bytes
        # The last chunks are taken when nothing travels any more; what stays was copied by then.
        own_us = situation.num_bytes / choice.num_programs / code.program_rate(self.device) / 1e3
        return total_us + max(take_us, own_us / 2)

    def _code(self, kernel: str, constants: str) -> Code:
        """The slowest variant for large groups and whole words."""
        found = []
        for name, rows in self._variants.items():
            if (
                name.startswith(f"{kernel}(")
                and constants in name
                and "WIDTH=16" in name
                and "PACKED=True" in name
            ):
                _, _, shared_bytes, flight_bytes, instructions = rows[str(self.device.capability)]
                num_warps = int(name.partition("num_warps=")[2].partition(",")[0].rstrip(")"))
                tiles = "TMA=True" in name
                found.append(Code(flight_bytes or shared_bytes, 0 if tiles else instructions, num_warps))
        return min(found, key=lambda code: code.program_rate(self.device))


class Heads(NamedTuple):
    """An attention layer: image tokens, text tokens are replicated and travel only back."""

    model: str
    tokens: int
    heads: int
    head_size: int


SHAPES = (
    Heads("Qwen-Image 1024 x 1024", 4096, 24, 128),
    Heads("FLUX.1 2048 x 2048", 16384, 24, 128),
    Heads("Wan 2.2 A14B 480p, 81 frames", 32760, 40, 128),
)


def heads_situation(shape: Heads, degree: int, num_tensors: int) -> Situation:
    """bfloat16. Three tensors go before attention, one comes back."""
    num_bytes = shape.tokens // degree * (shape.heads // degree) * shape.head_size * 2 * num_tensors
    # Targets of all ranks fit into a place, or those of none.
    into_place = num_bytes * degree <= DEVICE_SIZES["place_bytes"]
    operation = Operation.SCATTER_HEADS if num_tensors > 1 else Operation.GATHER_HEADS
    return Situation(operation, degree, num_bytes, target_in_heap=into_place)


_GATHER, _ALL, _BACK = Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.GATHER_HEADS
# Case, machine, situation, what others have published for it.
PUBLISHED = (
    ("all-reduce of 2 ranks, 512 bytes", H100, Situation(_GATHER, 2, 512), "3.7, SGLang's own"),
    ("all-to-all of 8 ranks, 4 KB", H200, Situation(_ALL, 8, 512), "10.4 to 11.1, NCCL on H20"),
    ("all-to-all of 8 ranks, 4 MB", A100, Situation(_ALL, 8, 1 << 19), "83.0, NCCL; 50.4, GFC"),
    ("all-gather of 8 ranks, 2 MiB", H100, Situation(_GATHER, 8, 1 << 18), "20.2, NCCL; 10.9, symmetric"),
    ("all-gather of 8 ranks, 8 MiB", H100, Situation(_GATHER, 8, 1 << 20), "43.4, NCCL; 27.4, symmetric"),
    ("all-gather of 8 ranks, 32 MiB", H100, Situation(_GATHER, 8, 4 << 20), "119, NCCL; 95, symmetric"),
    ("Ulysses of 4 ranks, 64 KB", B200, Situation(_BACK, 4, 1 << 14, False, True), "19.1, TRT-LLM"),
    ("Ulysses of 4 ranks, 1 MB", B200, Situation(_BACK, 4, 1 << 18, False, True), "20.5, TRT-LLM"),
)
BULK_BYTES = 16 << 20


def bulk_situations() -> Iterator[tuple[str, Situation, Choice | None]]:
    """Every large path that has a model, in four ranks."""
    plain = Situation(Operation.ALL_TO_ALL, 4, BULK_BYTES)
    yield "all-to-all, any tensors", plain, None
    yield "all-to-all, by tiles", plain, Choice(Way.TMA, 64 << 10, 32)
    yield "all-to-all, into the heap", plain._replace(target_in_heap=True), None
    yield "all-to-all, out of the heap", plain._replace(source_in_heap=True), None
    heads = Situation(Operation.SCATTER_HEADS, 4, BULK_BYTES)
    yield "heads, into place", heads._replace(target_in_heap=True), None
    yield "heads, too large for a place", heads, None


def small_situations() -> Iterator[tuple[str, Situation]]:
    yield "barrier", Situation(Operation.BARRIER, 8, 0)
    for kib in (1, 4, 16):
        yield f"all-gather, {kib} KiB of each rank", Situation(Operation.ALL_GATHER, 8, kib << 10)


def tables() -> str:
    models = {device: Model(device) for device in (*DEVICES, A100)}
    lines = [
        "Exchanges of heads, bfloat16, microseconds (share of the link's payload rate, of its line rate):",
        "",
    ]
    lines += [
        "| | ranks | sent by each | path | " + " | ".join(device.name for device in DEVICES) + " |",
        "|---" * (4 + len(DEVICES)) + "|",
    ]
    for shape in SHAPES:
        for degree in (2, 4, 8):
            for name, num_tensors in (("q, k, v", 3), ("output", 1)):
                found = [models[device].expect(heads_situation(shape, degree, num_tensors)) for device in DEVICES]
                cells = [
                    f"{each.us:.0f} ({_shares(each, device)})" for each, device in zip(found, DEVICES, strict=True)
                ]
                first = found[0]
                sent = f"{first.sent_bytes / 1e6:.1f} MB"
                row = [f"{shape.model}, {name}", str(degree), sent, _way(first.choice), *cells]
                lines.append("| " + " | ".join(row) + " |")
    lines += ["", f"Large paths on four H100, {BULK_BYTES >> 20} MiB from each rank to each other one:", ""]
    lines += ["| | path | microseconds | of the payload rate, of the line rate |", "|---|---|---|---|"]
    for name, situation, choice in bulk_situations():
        each = models[H100].expect(situation, choice)
        lines.append(f"| {name} | {_way(each.choice)} | {each.us:.0f} | {_shares(each, H100)} |")
    lines += ["", "Small ones on eight ranks, microseconds:", ""]
    lines += ["| | " + " | ".join(device.name for device in DEVICES) + " |", "|---" * (1 + len(DEVICES)) + "|"]
    for name, situation in small_situations():
        lines.append(
            f"| {name} | " + " | ".join(f"{models[device].expect(situation).us:.1f}" for device in DEVICES) + " |"
        )
    lines += ["", "Beside what others have published (microseconds):", ""]
    lines += ["| | machine | computed | path | published |", "|---|---|---|---|---|"]
    for name, device, situation, published in PUBLISHED:
        each = models[device].expect(situation)
        lines.append(f"| {name} | {device.name} | {each.us:.1f} | {_way(each.choice)} | {published} |")
    return "\n".join(lines)


def _shares(each: Expected, device: Device) -> str:
    return f"{each.share_of(device.link_rate):.0%}, {each.share_of(device.line_rate):.0%}"


def _way(choice: Choice) -> str:
    return f"{choice.path}, {choice.num_programs}"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}")
    print(tables())


if __name__ == "__main__":
    main()
