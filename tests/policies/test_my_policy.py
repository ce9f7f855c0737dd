"""The example that the documentation shows, run as it says."""

from __future__ import annotations

import random
from pathlib import Path

from gfdit.core.policy.loading import load_policy
from tests.support.cluster import Cluster
from tests.support.timed_cluster import simulate
from tests.support.workload import make_request, random_requests

ROOT = Path(__file__).parents[2]
SPEC = f"{ROOT / 'examples' / 'my_policy.py'}:OldestWidest"


def test_it_serves_the_oldest_request_on_as_many_ranks_as_it_may() -> None:
    run = simulate(
        load_policy(SPEC, {}), 4, [make_request("a"), make_request("b", arrival_s=1.0)], work_conserving=True
    )
    assert run.sizes("a") == [4, 4, 4]
    assert run.finish_s["a"] < run.finish_s["b"]
    assert set(simulate(load_policy(SPEC, {"max_ranks": "2"}), 4, [make_request("a")]).sizes("a")) == {2}


def test_it_keeps_the_rules() -> None:
    for seed in range(10):
        cluster = Cluster(load_policy(SPEC, {}), 4, seed)
        cluster.run(random_requests(random.Random(seed), 8))
        assert cluster.reports == []


def test_the_documentation_shows_it() -> None:
    source = (ROOT / "examples" / "my_policy.py").read_text()
    shown = (ROOT / "docs" / "policies.md").read_text().split("```python\n")[1].split("```")[0].partition("\n")[2]
    assert shown in source
