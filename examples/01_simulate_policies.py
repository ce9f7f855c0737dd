"""Which policy suits this traffic? The server's own control plane under a virtual clock; no GPU, no torch.

Simulates a burst of short images over a base load on four ranks, with the times of `qwen-image-h20`, and prints
the share of requests in time and their latencies under five policies. `gfdit sim` does the same from a shell.

    python examples/01_simulate_policies.py
"""

from gfdit.core.cost.table import TableCostModel
from gfdit.sim.compare import Job, PolicyChoice, simulate
from gfdit.sim.costs.cost_tables import load_cost_table
from gfdit.sim.options import SimulationOptions
from gfdit.sim.results import as_table
from gfdit.sim.workloads import PATTERNS, generate, workload_classes

NUM_RANKS = 4
POLICIES = (
    PolicyChoice("triage"),
    PolicyChoice("edf"),
    PolicyChoice("srtf"),
    PolicyChoice("equipartition"),
    PolicyChoice("fcfs", (("group_size", "2"),)),
)


def main() -> None:
    costs = load_cost_table("qwen-image-h20")
    workload = PATTERNS["foreground-burst"]
    classes = workload_classes(workload, TableCostModel(costs))
    trace = tuple(generate(workload, classes, num_ranks=NUM_RANKS, seed=1, load=0.9, num_requests=80))
    options = SimulationOptions(NUM_RANKS)
    jobs = [Job(policy, trace, costs, options) for policy in POLICIES]  # every policy meets the same requests
    print(as_table("policy", {job.policy.label: simulate(job).result for job in jobs}))


if __name__ == "__main__":
    main()
