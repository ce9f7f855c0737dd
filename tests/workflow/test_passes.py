"""Passes: what each does to a workflow, what it leaves alone, and which workflows it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gfdit.core import ParallelSpec, TaskKind
from gfdit.core.tasks import TaskGraph
from gfdit.workflow import Patch, Workflow, WorkflowError
from gfdit.workflow.caching import LookUp
from gfdit.workflow.compiling import CompiledWorkflow, Workflows
from gfdit.workflow.passes import ApproximateCache, AsynchronousLora, Split
from gfdit.workflow.recording import Builder
from gfdit.workflow.rewriting import Pass, Rewriting
from tests.workflow.models import Base, Decode, Noise, Text, record

LIMIT = 60


def image(*passes: Pass, name: str = "w", steps: int = 4, base: Base | None = None) -> Workflow:
    text, noise, decode, base = Text("sd"), Noise("sd"), Decode("sd"), base or Base("sd")
    with Workflow(name, steps, passes) as made:
        embeds, latents = text(prompt=made.add_input("prompt", str)), noise(seed=made.add_input("seed", int, 0))
        for step in range(steps):
            latents = base(step, latents=latents, embeds=embeds)
        made.add_output(decode(latents=latents))
    return made


def graph(made: Workflow, *, cached: bool = False, num_ranks: int = 4) -> TaskGraph:
    return CompiledWorkflow(made, cached).graph("r", num_ranks, guided=False)


def names(made: TaskGraph) -> list[str]:
    return [task.id.removeprefix("r/") for task in made.tasks]


def test_without_passes_everything_stays() -> None:
    made = image()
    assert CompiledWorkflow(made).workflow is made
    assert names(graph(made)) == ["text", "noise", "base/0", "base/1", "base/2", "base/3", "decode"]


def test_a_copy_is_rewritten_and_the_record_stays() -> None:
    made = image(ApproximateCache(2))
    before = [(node.name, dict(node.bindings)) for node in made.nodes]
    assert graph(made, cached=True) == graph(made, cached=True)
    assert [(node.name, dict(node.bindings)) for node in made.nodes] == before


def test_a_cached_workflow_begins_with_a_look_up_and_lacks_steps() -> None:
    made = graph(image(ApproximateCache(2)), cached=True)
    assert names(made) == ["text", "look-up", "base/2", "base/3", "decode"]
    look_up, step = made.tasks[1], made.tasks[2]
    assert look_up.kind is TaskKind.PREPARE
    assert look_up.inputs == ("r/text.embeds/0", "r/inputs")  # the seed comes with the request
    assert step.inputs == ("r/look-up.latents/0", "r/text.embeds/0")
    assert step.step_index == 2
    assert CompiledWorkflow(image(ApproximateCache(2)), cached=True).num_steps == 4  # of the schedule


def test_after_a_miss_all_steps_run_and_latents_are_put_in() -> None:
    made = graph(image(ApproximateCache(2)))
    assert names(made) == ["text", "noise", "base/0", "base/1", "put-in", "base/2", "base/3", "decode"]
    put_in = made.tasks[4]
    assert put_in.inputs == ("r/base.latents/1", "r/text.embeds/0")
    assert not any(name in task.reads for task in made.tasks for name in put_in.outputs)  # nobody waits for it


def test_both_go_to_the_cache_of_the_workflow() -> None:
    workflows = Workflows([Builder(name, 4, _named(name)) for name in ("one", "two")])
    caches = {
        name: {m.component for cached in (False, True) for m in workflows.get(name, cached=cached).models} - used
        for name in workflows.names
        if (used := {"Text:sd:None", "Noise:sd:None", "Base:sd:None", "Decode:sd:None"})
    }
    assert caches == {"one": {"cache:one:Noise:sd:None"}, "two": {"cache:two:Noise:sd:None"}}
    (cache,) = [one for one in workflows.components({}) if one.name == "cache:one:Noise:sd:None"]
    assert (cache.pinned, cache.ranks, cache.num_bytes) == (True, (0,), 2**30)
    compiled, node = workflows.node("one:4+cached/look-up")
    assert compiled.cached
    assert isinstance(node.model, LookUp)


def _named(name: str) -> Callable[[int], Workflow]:
    return lambda steps: image(ApproximateCache(2), name=name, steps=steps)


def test_a_cache_is_refused_where_it_makes_no_sense() -> None:
    for skip in (0, 4):
        with pytest.raises(WorkflowError, match=f"of 4 steps {skip} cannot be skipped"):
            graph(image(ApproximateCache(skip)))
    with pytest.raises(ValueError, match="workflow w has no cache"):
        graph(image(), cached=True)
    nets = record(1)
    nets.passes = (ApproximateCache(1),)
    with pytest.raises(WorkflowError, match="a workflow with nets cannot begin with cached latents"):
        graph(nets)


def test_a_lora_is_read_from_the_start_where_the_base_model_is() -> None:
    base = Base("sd")
    base.add_patch(Patch("lora"))
    made = graph(image(base=base))
    assert names(made)[:3] == ["base-lora", "text", "noise"]
    read = made.tasks[0]
    assert (read.component, read.inputs) == ("Base:sd:None", ())
    assert not any(name in task.reads for task in made.tasks for name in read.outputs)  # no step waits for it
    workflows = Workflows([Builder("w", 4, lambda steps: image(base=base, steps=steps))])
    assert workflows.models["Base:sd:None"] is base  # who reads LoRAs does not load the base model


def test_a_lora_that_is_taken_off_is_not_read() -> None:
    base = Base("sd")
    base.add_patch(patch := Patch("lora"))
    base.rm_patch(patch)
    assert names(graph(image(base=base)))[0] == "text"


def test_steps_are_split_as_far_as_the_pass_and_the_model_allow() -> None:
    def degrees(*passes: Pass, num_ranks: int = 4) -> set[tuple[ParallelSpec, ...]]:
        made = graph(image(*passes), num_ranks=num_ranks)
        return {task.candidates for task in made.tasks if task.kind is TaskKind.DENOISE}

    one, two, four = map(ParallelSpec, (1, 2, 4))
    assert degrees() == {(one, two, four)}
    assert degrees(Split(2)) == {(one, two)}
    assert degrees(Split()) == {(one,)}
    assert degrees(Split(8), num_ranks=2) == {(one, two)}
    assert degrees(Split(2, model="base")) == {(one, two)}


def test_guidance_is_split_only_where_it_is_said() -> None:
    class Guided(Base):
        def candidates(self, num_ranks: int, guided: bool = False) -> tuple[ParallelSpec, ...]:
            return (ParallelSpec(1), ParallelSpec(1, 2), ParallelSpec(2, 2))

    for cfg, expected in ((False, 1), (True, 3)):
        made = graph(image(Split(2, cfg), base=Guided("sd")))
        assert len(made.tasks[2].candidates) == expected


def test_a_split_of_nothing_is_refused() -> None:
    for one, message in (
        (Split(0), "sp must be at least 1, got 0"),
        (Split(2, model="bas"), "bas has no steps, models: base"),
    ):
        with pytest.raises(WorkflowError, match=message):
            graph(image(one))


def test_a_pass_cannot_put_something_of_another_type_in() -> None:
    class Wrong:
        def apply(self, rewriting: Rewriting) -> None:
            text, noise = rewriting.nodes[:2]
            rewriting.redirect(rewriting.value(noise), rewriting.value(text))

    with pytest.raises(WorkflowError, match="text makes Embeddings in the place of Latents"):
        graph(image(Wrong()))


def test_passes_follow_one_another() -> None:
    made = graph(image(ApproximateCache(2), Split(2)), cached=True)
    assert names(made) == ["text", "look-up", "base/2", "base/3", "decode"]
    assert len(made.tasks[2].candidates) == 2


def test_calls_of_one_component_in_two_workflows_can_be_one_batch() -> None:
    """The scheduler batches by component, kind, shape and guidance; the workflow is not asked."""
    basic, nets = (CompiledWorkflow(record(n)).graph(f"r{n}", 1, guided=False) for n in (0, 2))
    of_basic = {(task.component, task.kind) for task in basic.tasks}
    assert of_basic < {(task.component, task.kind) for task in nets.tasks}
    other = Base("another")
    fine_tuned = CompiledWorkflow(image(base=other)).graph("r", 1, guided=False)
    assert (other.component, TaskKind.DENOISE) not in of_basic  # other weights: never together
    assert len({task.component for task in (*basic.tasks, *fine_tuned.tasks)}) == 5


@pytest.mark.parametrize("made", [ApproximateCache, AsynchronousLora, Split])
def test_a_pass_is_short(made: type) -> None:
    import inspect

    path = Path(inspect.getfile(made))
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) < LIMIT
