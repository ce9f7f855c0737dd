"""How many GPUs for a target, and what if? By simulation, with a bound that another day's requests meet, too.

Asks for the fewest ranks on which nine of ten previews of ten steps are in time, and with half as many requests
more. `gfdit plan` does the same from a shell.

    python examples/03_plan_capacity.py
"""

from dataclasses import replace

from gfdit.sim.compare import PolicyChoice
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.plan import Demand, Requirement, Study, plan

PER_MIN = 60.0


def main() -> None:
    costs = load_cost_table("flux-h100")
    asked = Study(
        Demand(costs, "poisson", per_min=PER_MIN, duration_s=40.0, num_steps=10),
        (PolicyChoice("triage"),),
        (Requirement("attainment", 0.9),),
        SimulationOptions(1),
        seeds=(0, 1, 2),
    )
    more = replace(asked, demand=replace(asked.demand, arrivals=1.5))
    for title, study in ((f"{PER_MIN:g} requests a minute", asked), ("1.5 times as many", more)):
        for answer in plan(study):
            tried = ", ".join(
                f"{ranks}: {verdict.means[0]:.0%} (at least {verdict.bounds[0]:.0%})"
                for ranks, verdict in answer.verdicts.items()
            )
            print(f"{title}, {answer.policy}: {answer.num_ranks} ranks. In time with {tried}")


if __name__ == "__main__":
    main()
