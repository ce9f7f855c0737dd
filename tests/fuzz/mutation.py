"""Inputs made of valid examples by small changes, always the same ones for the same seed.

Of bytes: bits, spans, numbers and what is known to be read wrongly somewhere. Of JSON, also one value a line, the
tree is changed as well, so that what comes out is still JSON and gets further: a field that is lacking, that is
there under another name, or has a value of another kind.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Mutator = Callable[[random.Random, Sequence[bytes]], bytes]

MAX_BYTES = 1 << 16
"""Of an input: what grows with an input's length is to be seen by its time, not to fill the memory of the test."""

ODD_NUMBERS = (
    *(0, 1, -1, 2, 255, 256, 65536, -(2**31), 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(-(2**63), 10**30, 10**400, 0.5, -0.0, 1e-300, 5e-324, 1e15, 1e300, 1.7e308, 0.1 + 0.2),
)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS,
    *(None, True, False, "", " ", "0", "1.5", "nan", "\ud800", "a\udcffb", "\0", "a\nb", "\u2028", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}, float("nan"), float("inf"), -float("inf")),
)
_ODD_BYTES = (
    *(b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b'"', b"'", b"\\", b","),
    *(b"{", b"}", b"[", b"]", b":", b"=", b"@", b"NaN", b"Infinity", b"-", b"1e400", b"1e-400", b"null", b"true"),
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"\xf0\x9f\x90\xbc", b"%s", b"../", b"\\ud800", b"1_000", b"x"),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def mutated_bytes(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of ``seeds`` with one to four changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        _change(draw, data, seeds)
    return bytes(data[:MAX_BYTES])


def _change(draw: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 1, 2, 4, 16, 64, 256)))
    match draw.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            del data[at:end]
        case 2:
            data[at:at] = data[at:end] * draw.choice((1, 1, 2, 50))
        case 3:
            data[at:end] = draw.choice(_ODD_BYTES)
        case 4:
            data[at:at] = draw.choice(_ODD_BYTES)
        case 5:
            del data[at:]
        case 6:
            other = draw.choice(seeds)
            data[at:end] = other[draw.randrange(len(other) + 1) :][: draw.choice((4, 32, 256, 4096))]
        case _:
            if found := list(_NUMBER.finditer(data)):
                number = draw.choice(found)
                data[number.start() : number.end()] = str(draw.choice(ODD_NUMBERS)).encode()


def mutated_json(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A changed tree, or (one in four) changed bytes."""
    if draw.random() < 0.25:
        return mutated_bytes(draw, seeds)
    seed = draw.choice(seeds)
    try:
        tree = json.loads(seed)
    except (ValueError, RecursionError):  # something that was found, and is not JSON
        return mutated_bytes(draw, [seed])
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        tree = _changed(draw, tree)
    return _dumped(tree)[:MAX_BYTES]


def mutated_json_lines(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Some lines changed, left out, repeated or moved."""
    if draw.random() < 0.25:
        return mutated_bytes(draw, seeds)
    lines = draw.choice(seeds).rstrip(b"\n").split(b"\n")
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        at = draw.randrange(len(lines))
        match draw.randrange(8):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(draw.randrange(len(lines) + 1), lines[at])
            case 2:
                lines[at] = mutated_bytes(draw, [lines[at]])
            case 3:
                lines[at] = draw.choice(draw.choice(seeds).split(b"\n"))
            case _:
                try:
                    lines[at] = _dumped(_changed(draw, json.loads(lines[at])))
                except (ValueError, RecursionError):
                    continue
    return (b"\n".join(lines) + b"\n")[:MAX_BYTES]


def mutated_msgpack(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A changed tree as MessagePack, or (one in four) changed bytes."""
    if draw.random() < 0.25:
        return mutated_bytes(draw, seeds)
    try:
        tree = msgspec.msgpack.decode(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            tree = _changed(draw, tree)
        return msgspec.msgpack.encode(tree)[:MAX_BYTES]
    except (OverflowError, ValueError, RecursionError, TypeError):  # what it cannot say
        return mutated_bytes(draw, seeds)


def _dumped(tree: Any) -> bytes:
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        return b"1" * 5000


def _odd(draw: random.Random) -> Any:
    """A new one each time: it may be changed itself."""
    return copy.deepcopy(draw.choice(ODD_VALUES))


def _changed(draw: random.Random, tree: Any) -> Any:
    """With one change, at a place that is reached by going down at random."""
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        name = draw.choice(list(tree))
        match draw.randrange(12):
            case 0:
                del tree[name]
            case 1:
                tree[draw.choice((name + "x", name[:-1], name.upper(), "", "unknown", "\ud800"))] = tree.pop(name)
            case 2:
                tree[draw.choice(("unknown", "", "__class__", "id"))] = _odd(draw)
            case 3:
                tree[name] = tree[draw.choice(list(tree))]
            case _:
                tree[name] = _changed(draw, tree[name])
        return tree
    if isinstance(tree, list) and tree and draw.random() < 0.85:
        at = draw.randrange(len(tree))
        match draw.randrange(10):
            case 0:
                del tree[at]
            case 1:
                tree.insert(at, tree[draw.randrange(len(tree))])
            case 2:
                tree.insert(at, _odd(draw))
            case 3 if len(tree) <= 4:  # several times, within each other, would fill the memory
                tree *= 20
            case _:
                tree[at : at + 1] = [_changed(draw, tree[at])]  # which may be, and have shortened, this very list
        return tree
    match draw.randrange(6):
        case 0 if isinstance(tree, str) and tree:
            at = draw.randrange(len(tree))
            return tree[:at] + draw.choice(("", "\0", "\ud800", "é", " ", "/", ":", "-1", "x")) + tree[at + 1 :]
        case 1 if isinstance(tree, (int, float)) and not isinstance(tree, bool) and abs(tree) < 1e300:
            return draw.choice((-tree, tree + 1, tree - 1, tree * 2, tree % 7, str(tree)[:99], [tree], bool(tree)))
        case 2:
            return [tree]
        case 3:
            nested: Any = tree
            for _ in range(draw.choice((2, 100, draw.randrange(1000)))):  # Python gives up at about 1000
                nested = [nested]
            return nested
        case _:
            return _odd(draw)
