"""Components and workflows of one simulated server, drawn from its seed, and what is wrong with some of them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gfdit.core import (
    Decision,
    Dispatch,
    ExecutionLayout,
    ParallelSpec,
    RankView,
    SchedulerView,
    Task,
    TaskGraph,
    TaskKind,
    TaskView,
)
from gfdit.core.components import Component, Load
from gfdit.policies.lego import Lego
from gfdit.policies.random_layout import RandomLayout
from gfdit.policies.triage import Triage

KIB = 1024
WHOLE_MODEL = "m"
"""What requests without a workflow need: it is on every rank for good."""
MAX_PARTS = 3
_ONE = (ParallelSpec(1),)
_DEGREES = (_ONE, (ParallelSpec(1), ParallelSpec(2)), (ParallelSpec(1), ParallelSpec(1, 2), ParallelSpec(2, 2)))


class Flaws(NamedTuple):
    """Of a component: how likely a load of it or a task with it fails, or takes its process with it."""

    load_fails: float = 0.0
    load_kills: float = 0.0
    task_fails: float = 0.0
    task_kills: float = 0.0


SOUND = Flaws()


@dataclass(frozen=True, slots=True)
class Pool:
    """``component_bytes`` of ``components`` fit on a rank. ``flaws`` are those of some; the others have none."""

    components: Mapping[str, Component]
    component_bytes: int | None
    flaws: Mapping[str, Flaws]
    degrees: tuple[ParallelSpec, ...]  # of denoising steps
    measured: Mapping[str, int]  # what each takes in truth, which is not more than was declared

    @classmethod
    def draw(cls, draw: random.Random, num_ranks: int) -> Pool:
        names = ["text-0", "text-1", "base-0", "base-1", "net-0", "net-1", "net-2", "vae"]
        degrees = draw.choice(_DEGREES)
        components = {WHOLE_MODEL: Component(WHOLE_MODEL, KIB, pinned=True)}
        for name in names:
            num_bytes = draw.randint(1, 4) * KIB
            some = None
            if draw.random() < 0.12:
                some = tuple(sorted(draw.sample(range(num_ranks), draw.randint(1, num_ranks))))
            components[name] = Component(name, num_bytes, draw.choice([0.0, 0.1, 2.0]), draw.random() < 0.1, some)
        pinned = sum(one.num_bytes for one in components.values() if one.pinned)
        least = pinned + max(one.num_bytes for one in components.values())
        limit = draw.choice([None, least, least + draw.randint(1, 4) * KIB, least + 6 * KIB])
        flaws = {}
        for _ in range(draw.choice([0, 0, 1, 1, 2])):
            share = draw.choice([0.1, 0.5, 1.0])
            flaws[draw.choice(["text-1", "base-1", "net-0", "net-1", "net-2", draw.choice(names)])] = draw.choice(
                [
                    Flaws(load_fails=share),
                    Flaws(load_kills=share),
                    Flaws(task_fails=share),
                    Flaws(task_kills=share),
                ]
            )
        measured = {
            name: one.num_bytes - (draw.choice([0, 0, KIB // 2]) if limit else 0)
            for name, one in components.items()
        }
        return cls(components, limit, flaws, degrees, measured)

    def pinned_on(self, rank: int) -> set[str]:
        return {name for name, one in self.components.items() if one.pinned and one.may_be_on(rank)}

    def num_bytes(self, names: set[str]) -> int:
        return sum(self.measured[name] for name in names)

    def graph(self, draw: random.Random, request_id: str, num_steps: int) -> TaskGraph:
        if draw.random() < 0.3:
            return self._any_graph(draw, request_id)
        return self._usual_graph(draw, request_id, num_steps)

    def _usual_graph(self, draw: random.Random, request_id: str, num_steps: int) -> TaskGraph:
        """Encoders, steps with nets beside them, perhaps a second base model for the last ones, and a decoder."""
        tasks: list[Task] = []

        def add(
            name: str,
            kind: TaskKind,
            component: str,
            inputs: list[str],
            outputs: list[str],
            step: int = 0,
            deferred: tuple[str, ...] = (),
        ) -> None:
            reads, makes = (tuple(f"{request_id}/{one}" for one in names) for names in (inputs, outputs))
            specs = self.degrees if kind is TaskKind.DENOISE else _ONE
            late = tuple(f"{request_id}/{one}" for one in deferred)
            task_id = f"{request_id}/{name}"
            tasks.append(Task(task_id, request_id, kind, step, reads, makes, specs, late, component, name))

        texts = draw.sample(["text-0", "text-1"], draw.randint(1, 2))
        for text in texts:
            add(text, TaskKind.ENCODE, text, [], [f"{text}-embeds"])
        embeds = [f"{text}-embeds" for text in texts]
        if draw.random() < 0.3:
            add("image", TaskKind.ENCODE, "vae", [], ["condition"])
            embeds.append("condition")
        add("noise", TaskKind.PREPARE, "vae", [], ["latents/0"])
        nets = draw.sample(["net-0", "net-1", "net-2"], draw.choice([0, 1, 1, 2, 3]))
        whole = set(draw.sample(nets, len(nets))[:1]) if draw.random() < 0.2 else set()  # read once they are made
        bases = draw.sample(["base-0", "base-1"], 2)
        changes_at = draw.randint(1, num_steps) if num_steps and draw.random() < 0.3 else num_steps
        for step in range(num_steps):
            latents = f"latents/{step}"
            for net in nets:
                add(f"{net}/{step}", TaskKind.CONTROL, net, [*embeds, latents], [f"residuals-{net}/{step}"], step)
            late = tuple(f"residuals-{net}/{step}" for net in nets if net not in whole)
            there = [f"residuals-{net}/{step}" for net in nets if net in whole]
            base = bases[step >= changes_at]
            makes = [f"latents/{step + 1}"]
            add(f"base/{step}", TaskKind.DENOISE, base, [*embeds, latents, *there], makes, step, late)
        add("decode", TaskKind.DECODE, "vae", [*embeds, f"latents/{num_steps}"], [])
        return TaskGraph(request_id, tuple(tasks))

    def _any_graph(self, draw: random.Random, request_id: str) -> TaskGraph:
        """Tasks of any component that read any of what exists, some of it while it is made, one from the other."""
        made: list[str] = []
        read: set[str] = set()
        tasks: list[Task] = []
        names = sorted(set(self.components) - {WHOLE_MODEL})
        for index in range(draw.randint(1, 7)):
            inputs = draw.sample(made, draw.randint(1, min(3, len(made)))) if made else []
            late = [name for name in inputs if name not in read and draw.random() < 0.5]
            read.update(inputs)
            made = [name for name in made if name not in late]  # nobody else may read it
            outputs = tuple(f"{request_id}/x{index}.{k}" for k in range(draw.choice([0, 1, 1, 2]) or not made))
            kind, specs = (TaskKind.DENOISE, self.degrees) if index else (TaskKind.ENCODE, _ONE)
            whole = tuple(name for name in inputs if name not in late)
            task_id = f"{request_id}/t{index}"
            component = draw.choice(names)
            tasks.append(
                Task(task_id, request_id, kind, index, whole, outputs, specs, tuple(late), component, f"t{index}")
            )
            made.extend(outputs)
        return TaskGraph(request_id, tuple(tasks))

    def policy(self, draw: random.Random, seed: int) -> RandomPlaces | Lego | Triage | RandomLayout:
        kinds = (
            lambda: RandomPlaces(seed),
            lambda: RandomPlaces(seed),
            Lego,
            lambda: Lego(batching=False, adaptive=False),
            Triage,
            RandomLayout,
        )
        return draw.choice(kinds)()


def parts_of(artifact: str) -> int:
    """How many parts of an artifact are handed on while it is made."""
    return (0, 1, 2, MAX_PARTS, MAX_PARTS)[zlib.crc32(f"parts of {artifact}".encode()) % 5]


@dataclass(slots=True)
class Parts:
    """What streams consist of: every part says whose it is, and which."""

    _made: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def part(self, artifact: str, index: int) -> torch.Tensor:
        if (found := self._made.get((artifact, index))) is None:
            value = zlib.crc32(f"{artifact} {index}".encode())
            found = self._made[artifact, index] = torch.full((index + 1, 2), value, dtype=torch.int64)
        return found


class RandomPlaces:
    """Any task that can run, on any ranks that have its component; loads of what lacks, now and then of others.

    What a rank drops is drawn, too, so that much is loaded in vain. It leaves no rank idle for good: where nothing
    runs, the oldest task gets what it lacks.
    """

    name = "random places"
    run_ahead = True
    places_components = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def schedule(self, view: SchedulerView) -> Decision:
        ranks = {rank.id: rank for rank in view.ranks}
        free = [ranks[number] for number in view.free_ranks]
        dispatches: list[Dispatch] = []
        loads: list[Load] = []
        for task in view.ready:
            draw = random.Random(f"{self.seed} {task.id} {[rank.id for rank in free]}")
            able = [rank for rank in free if task.model in rank.resident]
            specs = [spec for spec in task.candidates if spec.size <= len(able)]
            if specs and draw.random() < 0.9:
                spec = draw.choice(specs)
                chosen = [rank.id for rank in draw.sample(able, spec.size)]
                dispatches.append(Dispatch((task.id,), ExecutionLayout(tuple(chosen), spec)))
                free = [rank for rank in free if rank.id not in chosen]
        draw = random.Random(f"{self.seed} {view.now_s}")
        for task in view.ready:
            there = sum(task.model in rank.resident or rank.loading == task.model for rank in view.ranks)
            if free and draw.random() < (0.2 if there else 0.6):
                free = self._load(task.model, draw, free, view, loads)
        if not (dispatches or loads) and all(rank.running_request is None for rank in view.ranks):
            return self._go_on(view, free, draw)
        return Decision(tuple(dispatches), loads=tuple(loads))

    def _go_on(self, view: SchedulerView, free: list[RankView], draw: random.Random) -> Decision:
        """Of the tasks in order, the first for which anything can be done."""
        for task in view.ready:
            able = [rank.id for rank in free if task.model in rank.resident]
            spec = min(task.candidates, key=lambda spec: (spec.size, spec.sp))
            if spec.size <= len(able):
                return Decision((Dispatch((task.id,), ExecutionLayout(tuple(able[: spec.size]), spec)),))
            if spec.size > len(self._places(task, view)):
                continue
            loads: list[Load] = []
            self._load(task.model, draw, free, view, loads)
            if loads:
                return Decision(loads=tuple(loads))
        return Decision()

    @staticmethod
    def _places(task: TaskView, view: SchedulerView) -> list[RankView]:
        """Where it could run."""
        component = view.components.get(task.model)
        return [rank for rank in view.ranks if component is None or component.may_be_on(rank.id)]

    @staticmethod
    def _load(
        name: str, draw: random.Random, free: list[RankView], view: SchedulerView, loads: list[Load]
    ) -> list[RankView]:
        """``name`` on one of ``free``, if there is one that could have it; returns the others."""
        table = view.components
        if (component := table.get(name)) is None:
            return free
        able = [rank for rank in free if name not in rank.resident and component.may_be_on(rank.id)]
        if not able:
            return free
        rank = draw.choice(able)
        others = sorted(one for one in rank.resident if one in table and not table[one].pinned)
        draw.shuffle(others)
        evict: list[str] = []
        if view.component_bytes is not None:
            left = view.component_bytes - sum(table[one].num_bytes for one in rank.resident if one in table)
            while others and (left < component.num_bytes or draw.random() < 0.1):
                evict.append(others.pop())
                left += table[evict[-1]].num_bytes
            if left < component.num_bytes:
                return free
        elif others and draw.random() < 0.2:
            evict.append(others.pop())
        loads.append(Load(rank.id, name, tuple(evict)))
        return [one for one in free if one.id != rank.id]
