"""Models of workflows: what they take and make, how they are loaded and run (LegoDiffusion paper, section 4.1).

A subclass declares its ports in ``setup_io`` and implements ``load`` and ``execute``; importing it loads no model.
Calling an instance inside of a :class:`~gfdit.workflow.Workflow` records a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gfdit.core.layouts import SINGLE, ExecutionLayout, ParallelSpec
from gfdit.core.tasks import TaskKind
from gfdit.workflow import recording

if TYPE_CHECKING:
    import torch


class Image:
    """A picture: PIL's as an input, (N, 3, H, W) between -1 and 1 as an output."""


class Latents:
    """What denoising steps change."""


class Embeddings:
    """What text encoders make of prompts."""


class Condition:
    """What a net takes beside latents: an encoded control image, for example."""


class Residuals:
    """What a net adds to the base model's blocks."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output.

    A ``deferred`` input may still be in the making when the model begins, a ``streamed`` output is made part by
    part. ``many``: a list of values. An ``optional`` input may be left out.
    """

    name: str
    type: type
    deferred: bool = False
    many: bool = False
    optional: bool = False
    streamed: bool = False


class Deferred(Protocol):
    """What ``execute`` gets for a deferred input."""

    def fetch(self, index: int) -> torch.Tensor:
        """Part number ``index``, whole; waits for it. Raises ``IndexError`` where there are fewer."""
        ...


class Call(Protocol):
    """What ``execute`` knows of its call."""

    step_index: int
    num_steps: int
    layout: ExecutionLayout
    device: torch.device
    request_id: str
    #: Patches that are active, one decision for all ranks; None: each from its own step on.
    patches: list[Patch] | None

    def emit(self, name: str, index: int, part: torch.Tensor) -> None:
        """Part number ``index`` of the streamed output ``name``; parts are handed in in order."""
        ...


@dataclass(frozen=True, slots=True)
class Patch:
    """A LoRA at ``source``. From ``step`` on, or, without one, from when it has been read (§4.2)."""

    source: str
    scale: float = 1.0
    step: int | None = None


class Model:
    """A component with typed inputs and outputs.

    ``source`` is where its weights are. Instances with the same :attr:`component` share one copy. ``pinned``: on
    its ranks from the start, and never evicted. ``ranks`` may hold it, by default all; nodes have its ``name``.
    """

    #: What a call of it is to the scheduler.
    kind: ClassVar[TaskKind]
    #: Folders of its weights in ``source``.
    folders: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self,
        source: str = "",
        *,
        name: str | None = None,
        dtype: str | None = None,
        pinned: bool = False,
        ranks: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.pinned = pinned
        self.ranks = ranks
        self.options = options
        self.patches: list[Patch] = []
        self.inputs: dict[str, Port] = {}
        self.outputs: dict[str, Port] = {}
        self.setup_io()
        self.name = name or type(self).__name__.lower()
        self.place = recording.place_of_author()

    @property
    def component(self) -> str:
        """The weights' identity."""
        return f"{type(self).__name__}:{self.source}:{self.dtype}"

    @property
    def loader(self) -> Model:
        """Whose ``load`` makes the component."""
        return self

    def stored_bytes(self) -> int | None:
        """Of the weights on disk; None if none are there and there should be."""
        if not self.folders:
            return 0
        paths = [path for folder in self.folders for path in (Path(self.source) / folder).glob("*.safetensors")]
        return sum(path.stat().st_size for path in paths) if paths and self.source else None

    # What a subclass declares

    def setup_io(self) -> None:
        """Call :meth:`add_input` and :meth:`add_output`."""
        raise NotImplementedError

    def add_input(
        self, name: str, type: type, *, deferred: bool = False, many: bool = False, optional: bool = False
    ) -> None:
        self.inputs[name] = Port(name, type, deferred, many, optional)

    def add_output(self, name: str, type: type, *, streamed: bool = False) -> None:
        self.outputs[name] = Port(name, type, streamed=streamed)

    def candidates(self, num_ranks: int, guided: bool = False) -> tuple[ParallelSpec, ...]:
        """At which specifications a call may run, on at most ``num_ranks``, the narrowest first."""
        return (SINGLE,)

    def guided(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a call computes both branches of guidance, by those of its inputs that no other model makes.

        That of an encoder: whether it makes embeddings for both. Steps are guided that say so and read such.
        """
        return False

    # What runs in workers

    def load(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Load the weights; what it returns is handed to :meth:`execute`."""
        return None

    def num_bytes(self, components: Any) -> int:
        """Of what :meth:`load` has returned."""
        return 0

    def execute(self, components: Any, call: Call, *_: Any, **inputs: Any) -> Mapping[str, Any]:
        """One call, on every rank of its layout; returns outputs by name, but for those that were emitted.

        Inputs must not be changed in place: the call may be repeated.
        """
        raise NotImplementedError

    def read_patches(self, components: Any) -> None:
        """Begin to read the weights of all :attr:`patches`; does not wait."""

    # What a workflow's author says

    def add_patch(self, patch: Patch) -> None:
        self.patches.append(patch)

    def rm_patch(self, patch: Patch) -> None:
        self.patches.remove(patch)

    def __call__(self, step: int | None = None, **inputs: Any) -> Any:
        """Record a call; ``step`` is that of the denoising loop. Returns a value per output, or the only one."""
        return recording.record(self, step, inputs)
