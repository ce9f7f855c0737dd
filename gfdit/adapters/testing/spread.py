"""How far apart the stock pipeline's own parallel degrees are: the measure for types that round coarsely.

In float32 a fixed tolerance tells rounding from errors. In bfloat16 rounding alone may move an output as far as a
small error would, and how far depends on model and request. The stock pipeline at another static degree computes
the same numbers and rounds them elsewhere, so it says how far is normal.
"""

from __future__ import annotations

from gfdit.adapters.testing.bench import Bench, CheckFailed
from gfdit.adapters.testing.kit import AdapterKit
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.requests import KitRequest
from gfdit.core.layouts import SINGLE, ParallelSpec

# One sample of rounding may lie this much further out than the few that the spread is taken from.
_ALLOWANCE = 1.25


def static_distances(kit: AdapterKit, request: KitRequest, stock: Output) -> dict[ParallelSpec, float]:
    """Root mean square distance from ``stock`` of the stock pipeline at each static degree that it has.

    Those are the specifications that a step of ``request`` can have, but for sequence parallelism where the
    stock transformer has no plan for it. Raises ``ChildError`` where stock fails at one.
    """
    distances = {}
    for spec in kit.candidates(request):
        if spec != SINGLE and spec.size <= kit.num_ranks and (spec.sp == 1 or kit.stock_splits_tokens()):
            degrees = {"ulysses_degree": spec.sp, "cfg_parallel_size": spec.cfg}
            (output,) = kit.stock(request, **degrees)
            distances[spec] = output.distance(stock)
    return distances


def check_spread(bench: Bench) -> str:
    """Layouts that change at every step come as near to stock as its own static degrees do."""
    told = []
    for request, stock in bench.each():
        distances = static_distances(bench.kit, request, stock)
        if not distances:
            raise CheckFailed(f"stock has no parallel degree to compare with: {request}")
        spread = max(distances.values())
        outputs = {
            script: bench.alone(request, script)
            for script in (bench.changing_script(request, number) for number in range(bench.num_scripts))
        }
        worst = max(outputs, key=lambda script: outputs[script].distance(stock))
        elastic = outputs[worst].distance(stock)
        static = ", ".join(f"{spec} {distance:.2g}" for spec, distance in distances.items())
        if not elastic <= _ALLOWANCE * spread:
            about = f"{request} under {worst!r}"
            raise CheckFailed(f"rms {elastic:.2g} from stock; stock's own degrees {static}: {about}")
        told.append(f"{elastic:.2g}, stock's own degrees {static}")
    return f"rms from stock: {'; '.join(told)}"
