"""The PTX of a compiled kernel as blocks of instructions, and what can be read off it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"^(\$?\w+):")
_BARRIER = re.compile(r"^(bar|barrier)\.(sync|red|arrive|cta)")
_NO_TARGET = ("st.", "bar", "bra", "ret", "exit", "fence", "membar", "red.", "cp.", "prefetch", "mbarrier")
_INLINE = re.compile(r"// begin inline asm(.*?)// end inline asm", re.S)
_WIDE = re.compile(r"^ld\.global(?:\.v(\d))?\.b(\d+)")


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


def loaded_ahead(ptx: str) -> int:
    """Bytes that a thread loads in a turn of a loop before it stores the first of them: of the loop with the most.

    Of loops without another one inside. The compiler keeps that order, since a store might be to what is loaded.
    """
    blocks, most = blocks_of(ptx), 0
    loops = [(begin, end) for end, block in enumerate(blocks) for begin in block.successors if begin <= end]
    for begin, end in loops:
        if any(begin <= inner and last <= end for inner, last in loops if (inner, last) != (begin, end)):
            continue
        num_bytes = 0
        for instruction in (each for inside in blocks[begin : end + 1] for each in inside.instructions):
            if match := _WIDE.match(instruction.text):
                num_bytes += int(match[1] or 1) * int(match[2]) // 8
            elif instruction.text.startswith("st.global"):
                break
        most = max(most, num_bytes)
    return most


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


def blocks_of(ptx: str) -> list[Block]:
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
