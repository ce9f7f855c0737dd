"""Steps of several requests in one dispatch, against each request alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gfdit.adapters.testing.bench import Bench, CheckFailed, expect_same, layout_word
from gfdit.adapters.testing.kit import AdapterKit, Batched
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.requests import KitRequest
from gfdit.core.layouts import SINGLE

# A text beside a shorter one is padded, which the second image of stock's own, with the same text, is not.
_ALLOWANCE = 2.0
# How far an image may be from itself made alone, in parts of how far another request's is.
_SAME_IMAGE = 0.2


def check_batched(bench: Bench) -> str:
    """Steps of several requests in one dispatch are those of each alone, whether or not they share a pass."""
    worst, sharing = 0.0, _Sharing()
    for request in bench.requests:
        for run in _run_pair(bench, request, sharing):
            worst = max(worst, bench.expect_near(run.output, run.alone, run.about))
    return f"differs from alone by at most {worst:.2g}, {sharing.summary()}"


def check_batch_spread(bench: Bench) -> str:
    """In a batch requests are as near to each alone as stock's own image is, made beside a second one.

    For types that round coarsely, where a batch adds in another order than a single request. What shares no pass
    must be bit-identical.
    """
    told, sharing = [], _Sharing()
    for request in bench.requests:
        runs = list(_run_pair(bench, request, sharing))
        if not any(run.shared for run in runs):
            for run in runs:
                expect_same(run.output, run.alone, run.about)
            told.append("none")
            continue
        worst = max(runs, key=lambda run: run.output.distance(run.alone))
        distance, own = worst.output.distance(worst.alone), stock_batch_distance(bench.kit, request)
        if distance > _ALLOWANCE * own:
            raise CheckFailed(
                f"rms {distance:.2g} from alone; stock beside a second image {own:.2g}: {worst.about}"
            )
        told.append(f"{distance:.2g}, stock beside a second image {own:.2g}")
    return f"rms from alone: {'; '.join(told)}; {sharing.summary()}"


def stock_batch_distance(kit: AdapterKit, request: KitRequest) -> float:
    """Root mean square distance of what stock makes of ``request`` from the same beside further images.

    The larger one for it and another request of its kind. Raises ``ChildError`` where stock cannot make several,
    :class:`CheckFailed` where the first of several is not the one alone.
    """
    pair = (request, _companion(request))
    alone = kit.stock(pair)
    several = kit.stock([one.but(num_images=2 * one.num_images) for one in pair])
    distance = max(_first(many, like=one).distance(one) for one, many in zip(alone, several, strict=True))
    if distance > _SAME_IMAGE * alone[0].distance(alone[1]):
        raise CheckFailed(f"the first of two images that stock makes is not the one alone: {request}")
    return distance


def _first(several: Output, like: Output) -> Output:
    return Output({name: array[: like.arrays[name].shape[0]] for name, array in several.arrays.items()})


@dataclass(frozen=True)
class _Run:
    """A request in a batch that ``shared`` some pass or none, and alone on the same layout."""

    about: str
    output: Output
    alone: Output
    shared: bool


@dataclass
class _Sharing:
    """How many requests shared each forward pass, or why they did not."""

    per_forward: list[float] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)

    def add(self, batched: Batched) -> None:
        self.per_forward += batched.requests_per_forward
        self.reasons.update(dict.fromkeys(batched.split_reasons))

    def summary(self) -> str:
        """Raises :class:`CheckFailed` if requests alike shared nothing, for no reason given."""
        mean = sum(self.per_forward) / len(self.per_forward) if self.per_forward else 1.0
        if mean <= 1 and not self.reasons:
            raise CheckFailed("requests alike do not share a forward pass, and nobody says why")
        why = f"; split since {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{mean:.2g} requests per forward pass{why}"


def _companion(request: KitRequest) -> KitRequest:
    """One that may share its steps, with a longer text and a step more."""
    steps = None if request.steps is None else request.steps + 1
    return request.but(seed=request.seed + 1, prompt=f"{request.prompt} in the rain, at dusk", steps=steps)


def _run_pair(bench: Bench, request: KitRequest, sharing: _Sharing) -> Iterator[_Run]:
    """``request`` and its companion in one dispatch per step, on one rank and at the widest degree."""
    pair = (request, _companion(request))
    widest = bench.specs(request)[-1]
    layouts = ["sp1@0"]
    if widest != SINGLE:
        layouts.append(layout_word(bench.rng(request, "batched"), widest, bench.kit.num_ranks))
    for layout in layouts:
        batched = bench.kit.run_batched(pair, layout, alone=bench.alone(request, layout))
        sharing.add(batched)
        for one, output in zip(pair, batched.outputs, strict=True):
            shared = any(number > 1 for number in batched.requests_per_forward)
            yield _Run(f"batched: {one} under {layout!r}", output, bench.alone(one, layout), shared)
