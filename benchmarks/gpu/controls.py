"""Negative controls: kernels with one safeguard taken out must be seen to fail, else the checks say nothing.

Rank 1 stalls where the safeguard matters; the real kernels stall there, too, and must pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.mutants import Edits, mutated
from benchmarks.gpu.ranks import Where, meet, random_bytes, same_bits, stale
from gfdit.comm import CommError, GroupFreeComm
from gfdit.comm.choice import Choice, Path

ROUNDS = 12
# How long a rank waits for another one that a mutant has misled.
TIMEOUT_S = 5.0
# How long rank 1 stalls: an interpreted rank needs milliseconds for a step.
GPU_STALL_NS, HOST_STALL_NS = 300_000, 60_000_000

_STALL = """@triton.jit
def stall(edges):
    if edges.rank == 1:
        clock = tl.load(edges.group.lane + LANE_CLOCK)
        until = now_ns(clock, edges.group.ptx) + {stall_ns}
        while now_ns(clock, edges.group.ptx) < until:
            pass


@triton.jit
def observe("""
_WAIT = "    return await_words(edges, words, tokens, mask)\n"
_SLOT = "return segment(lane, owner) + tl.load(lane + LANE_SLOTS) + index * tl.load(lane + LANE_SLOT_BYTES)"
_PAYLOAD = "                        PUT(edges.group, parts, position, place, first, last)\n"
_EARLY = """                        here = active & (edges.positions == position) & (chunk < chunks)
                        publish(edges, here, edges.published + step, chunk)
                        stall(edges)
"""


@dataclass(frozen=True, slots=True)
class Control:
    """``program``: "gathers" or "broadcasts"."""

    name: str
    program: str
    must_fail: bool
    edits: Edits = field(default_factory=dict)


CONTROLS = (
    Control("the real kernels, exchanging", "gathers", False),
    Control("the real kernels, one way", "broadcasts", False),
    Control("one data slot", "gathers", True, {"edges.py": ((_SLOT, _SLOT.replace("index", "index // 2 * 2")),)}),
    Control(
        "one data slot, one way",
        "broadcasts",
        True,
        {"edges.py": ((_SLOT, _SLOT.replace("index", "index // 2 * 2")),)},
    ),
    Control(
        "the same token every time",
        "gathers",
        True,
        {"edges.py": (("| (instance & 0xFFFFFF)", "| (instance * 0 + 1)"),)},
    ),
    Control(
        "no wait for the token",
        "gathers",
        True,
        {"edges.py": (("words, tokens, mask)", "words, tokens, mask & False)"),)},
    ),
    Control(
        "no credit",
        "broadcasts",
        True,
        {
            "edges.py": (
                ("    short = edges.others & (needed > edges.consumed)\n", "    short = edges.others & False\n"),
            )
        },
    ),
    Control(
        "token before payload",
        "gathers",
        True,
        {
            "slot_rounds.py": (
                (_PAYLOAD, _EARLY + _PAYLOAD),
                ("    rank_at,\n    usable,", "    rank_at,\n    stall,\n    usable,"),
            )
        },
    ),
)


def stalls(stall_ns: int) -> Edits:
    """Rank 1 stalls between seeing a token and reading the payload."""
    return {
        "edges.py": (
            ("@triton.jit\ndef observe(", _STALL.format(stall_ns=stall_ns)),
            (_WAIT, _WAIT.replace("return", "seen =") + "    stall(edges)\n    return seen\n"),
        )
    }


def run_controls(where: Where, controls: Sequence[Control]) -> list[str]:
    """What became of each program: "ok", "wrong bytes" or an error's name, of the rank that fared worst."""
    if where.heap == "local":
        by_control: list[Sequence[str]] = []
        for control in controls:
            with mutated(stalls(GPU_STALL_NS), control.edits, ptx=True):
                by_control.append(where.run(_run_program, control, num_ranks=2, comm_timeout_s=TIMEOUT_S))
    else:
        with tempfile.TemporaryDirectory() as directory:
            told = where.run(_run_mutated, controls, directory, num_ranks=2, comm_timeout_s=TIMEOUT_S)
        by_control = list(zip(*told, strict=True))
    return [next((text for text in ranks if text != "ok"), "ok") for ranks in by_control]


def _run_mutated(comm: GroupFreeComm, controls: Sequence[Control], directory: str) -> list[str]:
    on_gpu, told = comm.device.type == "cuda", []
    for number, control in enumerate(controls):
        with mutated(stalls(GPU_STALL_NS if on_gpu else HOST_STALL_NS), control.edits, ptx=on_gpu):
            meet(comm, directory, f"{number}-begin")
            told.append(_run_program(comm, control))
        meet(comm, directory, f"{number}-end")
        comm.reset(range(2))
        meet(comm, directory, f"{number}-reset")
    return told


def _run_program(comm: GroupFreeComm, control: Control) -> str:
    assert comm.selector is not None
    slot_bytes = comm.selector.site.layout.slot_bytes
    choice = Choice(Path.PUSH, slot_bytes // 4, 2 if comm.device.type == "cuda" else 1)
    try:
        with comm.selector.forced(choice):
            wrong = {"gathers": _gathers, "broadcasts": _broadcasts}[control.program](comm, slot_bytes // 2)
            comm.synchronize()
    except CommError as error:
        return type(error).__name__
    return "wrong bytes" if wrong else "ok"


def _gathers(comm: GroupFreeComm, num_bytes: int) -> int:
    """Through groups that overlap on the same edge; rank 0 runs ahead as far as it is let. Returns wrong ones."""
    steps = []
    for step in range(ROUNDS):
        group = comm.group((0, 1) if step % 2 else (1, 0))
        inputs = [random_bytes(comm.device, num_bytes, step, rank) for rank in group.ranks]
        steps.append((group, inputs[group.index], torch.cat(inputs)))
    outs = [stale(wanted) for _, _, wanted in steps]
    for out, (group, x, _) in zip(outs, steps, strict=True):
        comm.all_gather_into_tensor(out, x, group)
    comm.synchronize()
    return sum(not same_bits(out, wanted) for out, (_, _, wanted) in zip(outs, steps, strict=True))


def _broadcasts(comm: GroupFreeComm, num_bytes: int) -> int:
    wanted = [random_bytes(comm.device, num_bytes, step) for step in range(ROUNDS)]
    xs = [x.clone() if comm.rank == 0 else stale(x) for x in wanted]
    for x in xs:
        comm.broadcast(x, 0, comm.group((0, 1)))
    comm.synchronize()
    return sum(not same_bits(x, right) for x, right in zip(xs, wanted, strict=True))
