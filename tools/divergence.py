"""Barriers of a program that its threads may not all reach, found in the PTX of a compiled kernel.

A branch is divergent if threads may take different sides of it: its predicate depends on which thread it is, or on
a word of memory that changes while the kernel runs (two threads that load it one after the other see two values).
From such a branch to where its sides meet again there may be no barrier of the whole program: some threads would
wait at it for others that are waiting at another one, or not at all.

What all threads have alike: parameters, the number of the program, constants; plain loads from an address that is
alike, since what is loaded so does not change during a launch; loads from shared memory at an address that is
alike, which is how a reduction over all threads ends. Volatile, acquiring and relaxed loads, atomics, clocks and
shuffles are not alike.
"""

from __future__ import annotations

import re

from tools.ptx import Block, blocks_of

_DIFFERENT = re.compile(r"%(tid|laneid|warpid|clock|clock64|globaltimer)\b")
_NOT_ALIKE = re.compile(
    r"^(atom|shfl|vote|activemask|elect|match|redux)\b|^ld\.(\w+\.)*(volatile|acquire|relaxed)"
)


def unsafe_barriers(ptx: str) -> list[str]:
    """Of each divergent branch that a barrier lies behind, before its sides meet: the branch and the barrier."""
    blocks = blocks_of(ptx)
    meeting = _meeting_points(blocks)
    different = _different_registers(blocks, meeting)
    found = []
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and len(set(block.successors)) > 1 and last.predicate in different:
            for inside in sorted(_between(blocks, number, meeting[number])):
                for instruction in blocks[inside].instructions:
                    if instruction.is_barrier:
                        found.append(f"{block.label}: {last.text} before {blocks[inside].label}")
        for instruction in block.instructions:
            if instruction.is_barrier and instruction.predicate in different:
                found.append(f"{block.label}: {instruction.text} if {instruction.predicate}")
    return found


def _meeting_points(blocks: list[Block]) -> list[set[int]]:
    """Of each block, those that every way from it to the end leads through: its post-dominators but itself."""
    everything = set(range(len(blocks)))
    through = [everything if block.successors else {number} for number, block in enumerate(blocks)]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            if blocks[number].successors:
                common = set.intersection(*(through[following] for following in blocks[number].successors))
                new = common | {number}
                if new != through[number]:
                    through[number], changed = new, True
    return [points - {number} for number, points in enumerate(through)]


def _between(blocks: list[Block], branch: int, meeting: set[int]) -> set[int]:
    """Blocks from a branch to where its sides meet, the first of the meeting points."""
    seen: set[int] = set()
    ahead = list(blocks[branch].successors)
    while ahead:
        number = ahead.pop()
        if number not in meeting and number not in seen:
            seen.add(number)
            ahead += blocks[number].successors
    return seen


def _different_registers(blocks: list[Block], meeting: list[set[int]]) -> set[str]:
    """Those that threads may have different values in."""
    definitions: dict[str, int] = {}
    for block in blocks:
        for instruction in block.instructions:
            for register in instruction.defines:
                definitions[register] = definitions.get(register, 0) + 1
    different: set[str] = set()
    changed = True
    while changed:
        changed = False
        split: set[int] = set()
        for number, block in enumerate(blocks):
            last = block.instructions[-1] if block.instructions else None
            if last is not None and len(set(block.successors)) > 1 and last.predicate in different:
                split |= _between(blocks, number, meeting[number])
        for number, block in enumerate(blocks):
            for instruction in block.instructions:
                told = (
                    _NOT_ALIKE.match(instruction.text) is not None
                    or _DIFFERENT.search(instruction.text) is not None
                    or instruction.predicate in different
                    or any(register in different for register in instruction.uses)
                )
                for register in instruction.defines:
                    # What is set on one side only differs where the sides meet.
                    if register not in different and (told or (number in split and definitions[register] > 1)):
                        different.add(register)
                        changed = True
    return different
