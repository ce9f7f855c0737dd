"""Workflows as they are recorded and compiled, and every mistake with its author's line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gfdit.core import ParallelSpec, TaskKind
from gfdit.workflow import Image, Workflow, WorkflowError
from gfdit.workflow.compiling import CompiledWorkflow, Workflows, load_workflows
from gfdit.workflow.recording import Builder
from tests.workflow.models import Base, Control, Decode, Net, Noise, Text, record, two_nets

HERE = Path(__file__).name


def test_calls_become_tasks() -> None:
    graph = CompiledWorkflow(record(2)).graph("r", 2, guided=False)
    kinds = [task.kind for task in graph.tasks]
    assert kinds == [
        TaskKind.ENCODE,
        TaskKind.PREPARE,
        *[TaskKind.CONTROL, TaskKind.CONTROL, TaskKind.DENOISE] * 2,
        TaskKind.DECODE,
    ]
    step = graph.tasks[7]
    assert step.id == "r/base/1"
    assert step.inputs == ("r/base.latents/0", "r/text.embeds/0", "r/inputs")
    assert step.deferred == ("r/net-0.residuals/1", "r/net-1.residuals/1")
    assert step.candidates == (ParallelSpec(1), ParallelSpec(2))
    assert step.node == "nets-2:2/base/1"
    assert graph.tasks[0].outputs == ("r/text.embeds/0", "r/inputs")  # the guidance is read further down
    assert graph.tasks[-1].outputs == ()


def test_nobody_relays_what_nobody_reads_later() -> None:
    with Workflow("plain", 1) as made:
        prompt = made.add_input("prompt", str)
        embeds, latents = Text()(prompt=prompt), Noise()(seed=3)
        made.add_output(Decode()(latents=Base()(0, latents=latents, embeds=embeds)))
    graph = CompiledWorkflow(made).graph("r", 1, guided=False)
    assert not any("inputs" in name for task in graph.tasks for name in task.outputs)


def test_weights_with_one_source_are_one_component() -> None:
    workflows = Workflows([two_nets, Builder("nets-0", 2, lambda steps: record(0, steps))])
    assert workflows.names == ("nets-2", "nets-0")
    assert len(workflows.models) == 6
    assert workflows.users("Base:sd:None") == ["nets-2", "nets-0"]
    assert workflows.users("Net:net-1:None") == ["nets-2"]


def test_a_builder_is_recorded_for_the_steps_that_a_request_asks_for() -> None:
    workflows = Workflows([two_nets])
    assert workflows.get("nets-2").num_steps == 2
    assert workflows.get("nets-2", 5).num_steps == 5
    compiled, node = workflows.node("nets-2:5/base/4")
    assert compiled is workflows.get("nets-2", 5)
    assert node.step == 4


def test_guidance_needs_a_scale_and_something_to_guide_against() -> None:
    class Guided(Base):
        def guided(self, inputs: Mapping[str, object]) -> bool:
            return float(str(inputs["guidance"])) > 1 and "latents" not in inputs

    class Against(Text):
        def setup_io(self) -> None:
            super().setup_io()
            self.add_input("negative_prompt", str, optional=True)

        def guided(self, inputs: Mapping[str, object]) -> bool:
            return inputs.get("negative_prompt") is not None

    with Workflow("guided", 1) as made:
        prompt, negative = made.add_input("prompt", str), made.add_input("negative_prompt", str, None)
        embeds, latents = Against()(prompt=prompt, negative_prompt=negative), Noise()(seed=1)
        scale = made.add_input("scale", float, 1.0)
        made.add_output(Decode()(latents=Guided()(0, latents=latents, embeds=embeds, guidance=scale)))
    compiled = CompiledWorkflow(made)
    for values, expected in (
        ({"scale": 4.0, "negative_prompt": ""}, True),
        ({"scale": 4.0}, False),
        ({"negative_prompt": "blurry"}, False),
    ):
        assert compiled.guided(compiled.given({"prompt": "a", **values})) is expected
    assert not CompiledWorkflow(record()).guided({"prompt": "a", "seed": 0, "guidance": 9.0})


def test_what_a_request_brings_is_checked() -> None:
    compiled = CompiledWorkflow(record())
    assert compiled.given({"prompt": "a", "guidance": 4}) == {"prompt": "a", "seed": 0, "guidance": 4.0}
    for values, message in (
        ({}, "workflow nets-0 needs the input 'prompt' (str)"),
        ({"prompt": "a", "image": 1}, "workflow nets-0 has no input 'image', inputs: prompt, seed, guidance"),
        ({"prompt": 3}, "input 'prompt' must be str, got 3"),
        ({"prompt": "a", "seed": True}, "input 'seed' must be int, got True"),
    ):
        with pytest.raises(ValueError, match="input") as caught:
            compiled.given(values)
        assert str(caught.value) == message


def a_missing_input(w: Workflow) -> None:
    Base()(0, latents=Noise()(seed=1))


def an_unknown_input(w: Workflow) -> None:
    Noise()(seed=1, size=3)


def a_wrong_type(w: Workflow) -> None:
    Decode()(latents=Text()(prompt="a"))


def a_wrong_constant(w: Workflow) -> None:
    Noise()(seed="one")


def several_for_one(w: Workflow) -> None:
    latents = Noise()(seed=1)
    Decode()(latents=[latents, latents])


def no_output(w: Workflow) -> None:
    Noise()(seed=1)


def an_input_that_is_not_used(w: Workflow) -> None:
    w.add_input("prompt", str)
    w.add_output(Decode()(latents=Noise()(seed=1)))


def a_call_that_is_not_used(w: Workflow) -> None:
    latents = Noise()(seed=1)
    Text()(prompt="a")
    w.add_output(Decode()(latents=latents))


def two_outputs(w: Workflow) -> None:
    image = Decode()(latents=Noise()(seed=1))
    w.add_output(image)
    w.add_output(image, "again")


def an_output_that_is_read(w: Workflow) -> None:
    latents = Noise()(seed=1)
    w.add_output(latents, "latents")
    Decode()(latents=latents)


def an_input_twice(w: Workflow) -> None:
    w.add_input("prompt", str)
    w.add_input("prompt", str)


def a_default_of_another_type(w: Workflow) -> None:
    w.add_input("seed", int, "one")


def a_stream_that_is_not_deferred(w: Workflow) -> None:
    embeds, latents = Text()(prompt="a"), Noise()(seed=1)
    Reader()(residuals=Net()(0, latents=latents, embeds=embeds))


def a_stream_that_two_read(w: Workflow) -> None:
    embeds, latents = Text()(prompt="a"), Noise()(seed=1)
    residuals = Net()(0, latents=latents, embeds=embeds)
    for step in range(2):
        latents = Base()(step, latents=latents, embeds=embeds, residuals=[residuals])
    w.add_output(Decode()(latents=latents))


def an_output_that_is_no_value(w: Workflow) -> None:
    w.add_output("image")


class Reader(Decode):
    def setup_io(self) -> None:
        self.add_input("residuals", Net().outputs["residuals"].type)
        self.add_output("image", Image)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (a_missing_input, "base lacks its input embeds (Embeddings)"),
        (an_unknown_input, "noise has no input size, inputs: seed"),
        (a_wrong_type, "latents of decode must be Latents, got Embeddings"),
        (a_wrong_constant, "seed of noise must be int, got 'one'"),
        (several_for_one, "decode takes one value for latents, got 2"),
        (no_output, "workflow wrong has no output"),
        (an_input_that_is_not_used, "input prompt is used by no model"),
        (a_call_that_is_not_used, "what text makes is used by nothing"),
        (two_outputs, "output again is the second one, after image"),
        (an_output_that_is_read, "what noise makes is the output, and read as well"),
        (an_input_twice, "input prompt is added twice"),
        (a_default_of_another_type, "the default of input seed must be int, got 'one'"),
        (a_stream_that_is_not_deferred, "residuals of reader is not deferred, and cannot read a stream"),
        (a_stream_that_two_read, "residuals of net/0 is streamed, and read twice"),
        (
            an_output_that_is_no_value,
            "output image must be a value that a model of this workflow makes, got 'image'",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(mistake: Callable[[Workflow], None], message: str) -> None:
    with pytest.raises(WorkflowError) as caught, Workflow("wrong") as w:
        mistake(w)
    place, _, told = str(caught.value).partition(": ")
    assert told == message
    path, _, line = place.rpartition(":")
    assert Path(path).name == HERE
    lines = {number for *_, number in mistake.__code__.co_lines()}
    assert int(line) in lines or message == "workflow wrong has no output"


def test_everything_can_be_printed() -> None:
    """Each step refers to the one before: printing all of that would take for ever."""
    made = record(2, steps=40)
    shown = [repr(made), repr(made.nodes[-1]), repr(made.output), repr(made.inputs["seed"])]
    assert shown == ["workflow nets-2", "decode of workflow nets-2", "image of decode", "the input seed"]


def test_values_do_not_go_from_workflow_to_workflow() -> None:
    with Workflow("one") as one:
        latents = Noise()(seed=1)
        one.add_output(Decode()(latents=latents))
    with (
        pytest.raises(WorkflowError, match="latents of decode is a value of workflow one"),
        Workflow("two"),
    ):
        Decode()(latents=latents)


def test_a_model_is_called_in_a_workflow_only() -> None:
    with pytest.raises(WorkflowError, match="noise is called outside of a workflow"):
        Noise()(seed=1)
    with pytest.raises(WorkflowError, match="inside of another one"), Workflow("one"), Workflow("two"):
        pass


def test_files_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tmp_path / "good.py"
    good.write_text("from tests.workflow.models import two_nets, record\none = record(1)\n")
    assert load_workflows([good]).names == ("nets-2", "nets-1")
    for text, message in (
        ("x = 1\n", "there is no workflow in it"),
        ("x = (\n", ":1: '(' was never closed"),
        ("x = 1\ny = x / 0\n", ":2: ZeroDivisionError: division by zero"),
        ("from gfdit.workflow import Workflow\n\nw = Workflow('a b')\n", ":3: a workflow's name has no"),
    ):
        bad = tmp_path / "bad.py"
        bad.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.py") as caught:
            load_workflows([bad])
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    bad.write_text("x = 1 / 0\n")
    with pytest.raises(ValueError, match=r"^bad\.py:1: ZeroDivisionError: division by zero$"):
        load_workflows(["bad.py"])
    with pytest.raises(ValueError, match="there is no such file"):
        load_workflows([tmp_path / "none.py"])
    with pytest.raises(WorkflowError, match="there are two workflows nets-"):
        load_workflows([good, good])


def test_who_shares_a_component_agrees_on_its_place() -> None:
    def pinned(steps: int) -> Workflow:
        with Workflow("pinned", steps) as made:
            made.add_output(Decode("sd", pinned=True)(latents=Noise("sd")(seed=1)))
        return made

    workflows = Workflows([two_nets, Builder("pinned", 1, pinned)])
    with pytest.raises(WorkflowError, match="Decode:sd:None is shared, but pinned or on ranks differently"):
        workflows.components({})
    assert Control("sd").component == "Control:sd:None"
