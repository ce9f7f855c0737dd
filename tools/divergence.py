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
from collections.abc import Iterator
from dataclasses import dataclass, field

_REGISTER = re.compile(r"%[a-z]+\d+")
_DIFFERENT = re.compile(r"%(tid|laneid|warpid|clock|clock64|globaltimer)\b")
_LABEL = re.compile(r"^(\$?\w+):")
_NOT_ALIKE = re.compile(
    r"^(atom|shfl|vote|activemask|elect|match|redux)\b|^ld\.(\w+\.)*(volatile|acquire|relaxed)"
)
_BARRIER = re.compile(r"^(bar|barrier)\.(sync|red|arrive|cta)")
_NO_TARGET = ("st.", "bar", "bra", "ret", "exit", "fence", "membar", "red.", "cp.", "prefetch", "mbarrier")
_INLINE = re.compile(r"// begin inline asm(.*?)// end inline asm", re.S)


@dataclass(slots=True)
class Instruction:
    text: str
    predicate: str = ""
    defines: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    @property
    def is_barrier(self) -> bool:
        return bool(_BARRIER.match(self.text))


@dataclass(slots=True)
class Block:
    label: str
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)

    @property
    def has_barrier(self) -> bool:
        return any(instruction.is_barrier for instruction in self.instructions)


def unsafe_barriers(ptx: str) -> list[str]:
    """Of each divergent branch that a barrier lies behind, before its sides meet: the branch and the barrier."""
    blocks = _blocks(ptx)
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


def _instructions(ptx: str) -> Iterator[str]:
    body = ptx[ptx.index(".visible .entry") :]
    body = body[body.index("\n{") + 2 : body.rindex("\n}")]
    # What is written in one piece runs in one piece: labels in it are its own, and it has no barriers.
    body = _INLINE.sub(lambda match: _one_instruction(match[1]), body)
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if not line or line.startswith("."):
            continue
        while match := _LABEL.match(line):
            yield f"{match[1]}:"
            line = line[match.end() :].strip()
        yield from (part.strip() for part in line.split(";") if part.strip())


def _one_instruction(text: str) -> str:
    """Inline assembly with registers of its own as one instruction; the compiler's own, such as loads, as it is.

    What it writes to may differ if it loads what changes.
    """
    assert not re.search(r"\bbar(rier)?\.", text), "a barrier in inline assembly"
    if ".reg" not in text:
        return f"\n{text}\n"
    registers = list(dict.fromkeys(_REGISTER.findall(text)))
    kind = "atom" if re.search(r"\bld\.|%clock|%globaltimer|%tid", text) else "mov"
    return f"\n{kind}.inline {', '.join(registers)};\n" if registers else "\n"


def _parsed(text: str) -> Instruction:
    predicate = ""
    if text.startswith("@"):
        guard, _, text = text.partition(" ")
        predicate = guard.lstrip("@!")
        text = text.strip()
    registers = tuple(_REGISTER.findall(text))
    if text.startswith(("atom.inline", "mov.inline")):
        # Which of them it writes is not looked at: any may be.
        return Instruction(text, predicate, registers, registers)
    if text.startswith(_NO_TARGET) or not registers:
        return Instruction(text, predicate, (), registers)
    operands = text.partition(" ")[2].strip()
    target = operands[: operands.index("}") + 1] if operands.startswith("{") else operands.split(",")[0]
    if text.startswith("setp"):  # it may define two
        target = target.replace("|", " ")
    defines = tuple(_REGISTER.findall(target))
    return Instruction(text, predicate, defines, tuple(_REGISTER.findall(operands[len(target) :])))


def _blocks(ptx: str) -> list[Block]:
    blocks = [Block("entry")]
    for text in _instructions(ptx):
        if text.endswith(":"):
            blocks.append(Block(text[:-1]))
            continue
        instruction = _parsed(text)
        blocks[-1].instructions.append(instruction)
        if instruction.text.startswith(("bra", "ret", "exit")):
            blocks.append(Block(f"after {blocks[-1].label}"))
    numbers = {block.label: number for number, block in enumerate(blocks)}
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is None or not last.text.startswith(("bra", "ret", "exit")) or last.predicate:
            block.successors += [number + 1] if number + 1 < len(blocks) else []
        if last is not None and last.text.startswith("bra"):
            block.successors.append(numbers[last.text.split()[-1]])
    return blocks


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
