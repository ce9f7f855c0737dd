"""What is drawn at random, and how likely each value is: ``512:.3,1024:.5,1536:.2``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gfdit.core.tasks import Shape
from gfdit.sim.arrivals import place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shares(Generic[T]):
    """``weights`` are those of ``values``; they need not add up to one."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, draw: random.Random) -> T:
        return self.at(draw.random())

    def at(self, position: float) -> T:
        """By a number from 0 to 1 that was drawn elsewhere."""
        return self.values[place(self.weights, position)]

    @classmethod
    def even(cls, values: Sequence[T]) -> Shares[T]:
        return cls(tuple(values), (1.0,) * len(values))

    @classmethod
    def parse(cls, text: str, read: Callable[[str], T], what: str) -> Shares[T]:
        """``VALUE:SHARE`` with commas between them; without a share it is 1.

        Raises ``ValueError`` naming ``what`` for a share that is no number above zero, and what ``read`` raises.
        """
        values, weights = [], []
        for part in text.split(","):
            value, colon, share = part.strip().rpartition(":")
            weight = _number(share) if colon else 1.0
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"{what}: the share of {value!r} must be a positive number, got {share!r}")
            values.append(read(value if colon else share))
            weights.append(weight)
        if again := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{what}: {again[0]} is there twice")
        return cls(tuple(values), tuple(weights))


def shape_of(text: str) -> Shape:
    """``1024`` is a square image; ``480x832`` height and width; ``480x832x81`` frames as well, in pixels.

    Raises ``ValueError`` for anything else.
    """
    numbers = text.split("x")
    if not 1 <= len(numbers) <= 3 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"a size must be SIDE, HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got {text!r}")
    height, *rest = map(int, numbers)
    return Shape(height, *rest) if rest else Shape(height, height)


def name_of(shape: Shape) -> str:
    """The side of a square image; as :class:`Shape` prints itself otherwise."""
    return str(shape.height) if shape == Shape(shape.height, shape.height) else str(shape)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
