"""A policy in ten lines: oldest request first, each task as wide as the free ranks allow.

Checks that it keeps the rules, also with ranks that are slow or lost, and compares it with the default policy:

    python examples/02_write_a_policy.py

The same file serves: gfdit serve MODEL --ranks 4 --policy examples/02_write_a_policy.py:OldestWidest
"""

from dataclasses import dataclass

from gfdit.core import Decision, Dispatch, FreeRanks, SchedulerView
from gfdit.core.layouts import widest


@dataclass
class OldestWidest:
    """Oldest request first, each task as wide as the free ranks allow."""

    max_ranks: int = 8
    name = "oldest-widest"
    run_ahead = True

    def schedule(self, view: SchedulerView) -> Decision:
        free, dispatches = FreeRanks.of(view.ranks), []
        for task in view.ready:  # oldest request first
            most = min(free.count(task.model), self.max_ranks)
            if spec := widest(view.cost.candidates(task), most):
                last = view.requests[task.request_id].last_layout  # its ranks hold what the task needs
                if layout := free.take(spec, task.model, last):
                    dispatches.append(Dispatch((task.id,), layout))
        return Decision(tuple(dispatches))


def main() -> None:
    from tempfile import TemporaryDirectory

    from gfdit.cli.main import main as gfdit
    from gfdit.sim.checking import check_policy

    check_policy(OldestWidest, seeds=range(1))
    print("OldestWidest keeps the rules")
    costs = ("--costs", "flux-h100", "--ranks", "4")
    with TemporaryDirectory() as folder:
        trace = f"{folder}/trace.jsonl"
        gfdit(["workload", "gamma", *costs, "--load", "0.8", "--num-requests", "40", "--out", trace])
        for policy in ("triage", f"{__file__}:OldestWidest"):
            print()
            gfdit(["sim", "--trace", trace, *costs, "--policy", policy])


if __name__ == "__main__":
    main()
