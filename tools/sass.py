"""The machine code of a compiled kernel, and what its copy loops cost: read off the disassembly."""

from __future__ import annotations

import re
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import get_cache_manager

_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(\S+)")
_GLOBAL = re.compile(r"^(LD|ST)G?\.E(?:\.[A-Z]+)*?(?:\.(U8|S8|U16|64|128))?(?:\.|$)")
_BYTES = {None: 4, "U8": 1, "S8": 1, "U16": 2, "64": 8, "128": 16}


class CopyLoop(NamedTuple):
    """One turn of a loop that copies, of one thread."""

    num_instructions: int
    loaded_bytes: int
    stored_bytes: int

    @property
    def instructions_per_byte(self) -> float:
        return self.num_instructions / self.stored_bytes


def copy_loops(cubin: bytes) -> list[CopyLoop]:
    """Loops without another one inside, in the order of the code, that load and store 16 bytes a thread or more.

    Raises ValueError if the disassembler is not understood.
    """
    return copy_loops_of(disassembled(cubin))


def disassembled(cubin: bytes) -> str:
    """Kept in the cache of this version of Triton, which has the disassembler: that takes a second to start."""
    cache = get_cache_manager(sha256(triton.__version__.encode() + cubin).hexdigest())
    if kept := cache.get_file("sass"):
        return Path(kept).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cache.put(text, "sass", binary=False)
    return text


def copy_loops_of(text: str) -> list[CopyLoop]:
    """See ``copy_loops``."""
    code: list[str] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(code)
        elif instruction := _CODE.match(line):
            if branch := _BRANCH.search(line):
                branches.append((len(code), branch[1]))
            code.append(instruction[1])
    if not code or not all(label in places for _, label in branches):
        raise ValueError(f"no code in {text[:200]!r}")
    loops = [(places[label], end) for end, label in branches if places[label] <= end]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b for c, d in loops if (c, d) != (a, b))]
    found = []
    for begin, end in inner:
        moved = {"LD": 0, "ST": 0}
        for name in code[begin : end + 1]:
            if match := _GLOBAL.match(name):
                moved[match[1]] += _BYTES[match[2]]
        if min(moved.values()) >= 16:
            found.append(CopyLoop(end - begin + 1, moved["LD"], moved["ST"]))
    return found
