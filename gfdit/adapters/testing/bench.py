"""What the checks of an adapter share: runs that are made once, random layouts, and comparisons that explain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gfdit.adapters.testing.kit import AdapterKit
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.requests import KitRequest
from gfdit.core.layouts import SINGLE, ParallelSpec


class CheckFailed(AssertionError):  # noqa: N818 - reads as what happened
    """What a check found."""


@dataclass(slots=True)
class Bench:
    """The kit, the requests, what stock makes of them, and runs of one request alone."""

    kit: AdapterKit
    requests: Sequence[KitRequest]
    tolerance: float
    seed: int
    num_scripts: int
    stock: list[Output]
    _alone: dict[tuple[KitRequest, str], Output] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[KitRequest, Output]]:
        return zip(self.requests, self.stock, strict=True)

    def alone(self, request: KitRequest, script: str) -> Output:
        """``request`` under ``script``, run once whoever asks."""
        key = (request, script)
        if key not in self._alone:
            self._alone[key] = self.kit.run(request, script)
        return self._alone[key]

    def rotating_script(self, request: KitRequest) -> str:
        """Every task on another rank than the one before, all on a single one."""
        num_ranks = self.kit.num_ranks
        ranks = self.rng(request, "rotating").sample(range(num_ranks), num_ranks)
        steps = " ".join(f"sp1@{ranks[(2 + step) % num_ranks]}" for step in range(num_ranks))
        return f"encode@{ranks[0]} prepare@{ranks[1 % num_ranks]} {steps} decode@{ranks[-1]}"

    def changing_script(self, request: KitRequest, number: int = 0) -> str:
        """Another layout for every step; if there are enough, every specification the request can have."""
        num_ranks, rng = self.kit.num_ranks, self.rng(request, str(number))
        wide = [spec for spec in self.specs(request) if spec != SINGLE]
        specs = [*rng.sample(wide, len(wide)), SINGLE]
        length = max(len(specs), 6)
        steps = [layout_word(rng, specs[index % len(specs)], num_ranks) for index in range(length)]
        places = [rng.randrange(num_ranks) for _ in range(3)]
        return f"encode@{places[0]} prepare@{places[1]} {' '.join(steps)} decode@{places[2]}"

    def specs(self, request: KitRequest) -> list[ParallelSpec]:
        return [spec for spec in self.kit.candidates(request) if spec.size <= self.kit.num_ranks]

    def rng(self, request: KitRequest, purpose: str) -> random.Random:
        """The same for the same seed, request and purpose, whatever else runs."""
        return random.Random(f"{self.seed} {request} {purpose}")

    def expect_near(self, output: Output, reference: Output, about: str) -> float:
        difference = output.difference(reference)
        if difference > self.tolerance:
            raise CheckFailed(f"differs by {difference:.2g} > {self.tolerance:.2g}: {about}")
        return difference


def layout_word(rng: random.Random, spec: ParallelSpec, num_ranks: int) -> str:
    """``spec`` on random ranks in random order, as a word of a script."""
    return f"{spec}@{','.join(map(str, rng.sample(range(num_ranks), spec.size)))}"


def expect_same(output: Output, reference: Output, about: str) -> None:
    if not output.identical(reference):
        raise CheckFailed(f"differs by {output.difference(reference):.2g}, bits must be the same: {about}")
