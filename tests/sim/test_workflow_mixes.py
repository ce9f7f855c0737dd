"""The simulation input for workflows: costs against what is published, graphs, traces and mixes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from gfdit.core import ParallelSpec, Request, SchedulerView, TaskKind
from gfdit.core.cost.file import CostTable
from gfdit.core.policy import Decision
from gfdit.policies.lego import Lego
from gfdit.sim.costs.workflow_costs import BASES, GIB, LORA_BYTES, MIB, SHAPE, component_table, step_s
from gfdit.sim.simulator import SimulationOptions, Simulator, Status
from gfdit.sim.workflow_mixes import SETTINGS, WorkflowMix, lora_swap_s, paper_setting, production_mix


@pytest.fixture(scope="module")
def s6() -> WorkflowMix:
    return paper_setting("S6")


def test_what_the_paper_says_of_loading_and_of_two_ranks() -> None:
    sd3 = next(one for one in component_table(BASES.values()) if one.name == "sd3")
    assert sd3.load_s == pytest.approx(0.43, rel=0.05)
    assert lora_swap_s() == pytest.approx(0.1, rel=0.1)
    base = BASES["sd3"]
    assert step_s(base) == pytest.approx(0.112)
    assert step_s(base) / step_s(base, ParallelSpec(1, 2)) == pytest.approx(1.9, rel=0.02)
    dev = BASES["flux-dev"]
    assert 1.6 < step_s(dev) / step_s(dev, ParallelSpec(2)) < 1.9
    assert step_s(dev, batch=2) < 2 * step_s(dev)


@pytest.mark.parametrize(("name", "ratio"), [("sd3", 3.8), ("sd3.5-large", 1.7), ("flux-dev", 1.4)])
def test_pipelines_are_larger_than_their_base_models(name: str, ratio: float) -> None:
    base = BASES[name]
    total = sum(one.num_bytes for one in component_table([base], num_nets=0))
    assert total / (base.gib * GIB) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_have_costs_for_all_tasks(setting: str) -> None:
    mix = paper_setting(setting, lora=True)
    assert len(mix.variants) == 6 * len(SETTINGS[setting])
    known = {(e.model, e.task, e.cfg, e.parallel) for e in mix.costs.entries if e.batch == 1}
    for name, variant in mix.variants.items():
        guided = variant.base.guided
        request = Request(name, name, SHAPE, variant.base.num_steps, 0.0, cfg=guided)
        tasks = mix.graphs(8)(request).tasks
        assert {(t.component, t.kind, guided, spec) for t in tasks for spec in t.candidates} <= known
        steps = variant.base.num_steps
        assert len(tasks) == 3 + steps * (1 + len(variant.nets)) + len(variant.nets) + variant.lora
    assert {one.name for one in mix.components} == {model for model, *_ in known}


def test_the_table_is_a_file_like_others(s6: WorkflowMix, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("costs") / "s6.json"
    s6.costs.save(path)
    assert CostTable.load(path) == s6.costs


def test_what_is_passed_on_has_a_size_for_workflow_and_reader(s6: WorkflowMix) -> None:
    sizes = {(one.model, one.artifact): one.num_bytes for one in s6.costs.artifacts}
    for model in ("flux-dev", "flux-dev+cn1+cn2"):
        assert sizes[model, "net-1.residuals" if "cn" in model else "base.latents"] > 0
    assert sizes["flux-dev", "net-2.residuals"] == 48 * MIB
    assert ("flux-schnell+cn1", "net-2.residuals") not in sizes


@pytest.mark.parametrize("setting", ["S1", "S2", "S3", "S4"])
def test_three_workflows_share_most_of_their_memory(setting: str) -> None:
    for stacked in (True, False):
        mix = paper_setting(setting, stacked=stacked)
        together = sum(one.num_bytes for one in mix.components)
        assert together <= 0.4 * mix.num_bytes_apart()
    plain, lora = paper_setting(setting), paper_setting(setting, lora=True)
    assert lora.num_bytes_apart() == 2 * plain.num_bytes_apart() + 3 * LORA_BYTES


def test_a_lora_that_is_not_hidden_takes_longer() -> None:
    hidden, shown = (paper_setting("S1", lora=True, hides_lora=hides) for hides in (True, False))
    assert hidden.alone_s("sd3+lora") - hidden.alone_s("sd3") == pytest.approx(0.05)
    assert shown.alone_s("sd3+lora") - shown.alone_s("sd3") == pytest.approx(0.5)


def test_deadlines_follow_from_the_time_alone(s6: WorkflowMix) -> None:
    trace = s6.trace(40, per_min=60, slo_scale=3.0)
    for line in trace:
        assert line.deadline_s == pytest.approx(3 * s6.alone_s(line.model), abs=1e-5)
        assert line.num_steps == (4 if "schnell" in line.model else 28)
    assert {line.model for line in trace} == set(s6.variants)
    dev = BASES["flux-dev"]
    assert s6.alone_s("flux-dev") == pytest.approx(28 * dev.step_s, rel=0.02)


def test_rate_load_burstiness_and_seed(s6: WorkflowMix) -> None:
    def gaps(**options: float) -> list[float]:
        times = [line.arrival_s for line in s6.trace(3000, **options)]  # type: ignore[arg-type]
        return [later - earlier for earlier, later in pairwise(times)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    assert mean(gaps(per_min=120)) == pytest.approx(0.5, rel=0.1)
    alone_s = mean([s6.alone_s(name) for name in s6.variants])
    assert mean(gaps(load=0.5, num_ranks=8)) == pytest.approx(alone_s / 4, rel=0.1)
    smooth, bursty = gaps(per_min=60), gaps(per_min=60, cv=4.0)
    assert mean([gap**2 for gap in bursty]) > 4 * mean([gap**2 for gap in smooth])
    assert s6.trace(5, per_min=6, seed=1) == s6.trace(5, per_min=6, seed=1) != s6.trace(5, per_min=6, seed=2)


@pytest.mark.parametrize(
    "options", [{}, {"load": 1.0, "per_min": 1.0}, {"load": 0.0}, {"per_min": 1.0, "slo_scale": 0.0}]
)
def test_numbers_out_of_range(s6: WorkflowMix, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|give either"):
        s6.trace(3, **options)  # type: ignore[arg-type]


def test_names_out_of_range() -> None:
    with pytest.raises(ValueError, match="there is no setting 'S7', settings: S1, S2"):
        paper_setting("S7")
    with pytest.raises(ValueError, match="num_bases must be above 10, got 10"):
        production_mix(10)


def test_the_production_mix_is_as_skewed_as_the_log() -> None:
    mix = production_mix()
    assert len(mix.bases) == 87
    assert sum(mix.shares) == pytest.approx(1)
    by_base: Counter[str] = Counter()
    for share, variant in zip(mix.shares, mix.variants.values(), strict=True):
        by_base[variant.base.name] += share  # type: ignore[assignment]
    assert sum(share for _, share in by_base.most_common(10)) == pytest.approx(0.87)
    loras = [share for share, variant in zip(mix.shares, mix.variants.values(), strict=True) if variant.lora]
    assert sum(loras) == pytest.approx(0.16)


class Watched(Lego):
    """Notes which workflows ran together."""

    def __init__(self, workflow_of: dict[str, str]) -> None:
        super().__init__()
        self.workflow_of = workflow_of
        self.together: set[frozenset[tuple[str, TaskKind]]] = set()

    def schedule(self, view: SchedulerView) -> Decision:
        decision = super().schedule(view)
        of = {task.id: (self.workflow_of[task.request_id], task.kind) for task in view.ready}
        self.together |= {frozenset(of[name] for name in dispatch.tasks) for dispatch in decision.dispatches}
        return decision


def test_calls_of_several_workflows_run_as_one_batch() -> None:
    """Nothing but what they are calls of makes them one; other base models stay apart."""
    mix = paper_setting("S5")
    trace = mix.trace(12, per_min=6000)
    policy = Watched({line.id: line.model for line in trace})
    options = SimulationOptions(2, components=mix.components, component_bytes=80 * GIB)
    run = Simulator(policy, mix.costs, trace, options, mix.graphs(2)).run()
    assert {request.status for request in run.requests} == {Status.COMPLETED}
    several = [batch for batch in policy.together if len(batch) > 1]
    steps = [{model.partition("+")[0] for model, kind in batch if kind is TaskKind.DENOISE} for batch in several]
    assert any(steps)
    assert all(len(bases) <= 1 for bases in steps)
    texts = [{model.partition("+")[0] for model, kind in batch if kind is TaskKind.ENCODE} for batch in several]
    assert {"sd3", "sd3.5-large"} in texts  # both have the same encoders
