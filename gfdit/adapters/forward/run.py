"""One request's ``forward`` on one rank: where it is cut, what it leaves for others to go on from, and going on.

A log has an entry for every call of a model that the forward has made. To go on elsewhere, ``forward`` begins anew
there and its calls are answered from the log. How much of a value the log keeps is the
:class:`~gfdit.adapters.forward.verdict.Mode`.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch.utils._pytree import tree_leaves, tree_map_only

from gfdit.adapters.forward import seam
from gfdit.adapters.forward.batch import Pending, num_rows
from gfdit.adapters.forward.coroutine import Coroutine
from gfdit.adapters.forward.inpainting import Inpainting
from gfdit.adapters.forward.overlay import Overlay, State, is_scheduler
from gfdit.adapters.forward.past import Past, past_of, specs_of
from gfdit.adapters.forward.seam import Kind
from gfdit.adapters.forward.step_caches import Attributes, Share, StepCaches
from gfdit.adapters.forward.verdict import Cut, Keep, Mode
from gfdit.adapters.forward.waits import WithoutWaits
from gfdit.adapters.masked_tokens import Prediction, predicting

_HOST = torch.device("cpu")
# What an image is encoded as travels as it was made, without what was computed of it.
copyreg.pickle(DiagonalGaussianDistribution, lambda made: (type(made), (made.parameters, made.deterministic)))


class ReplayError(RuntimeError):
    """A forward that is replayed has gone another way than it went before."""


class Entry(NamedTuple):
    """One call: ``value`` has specs in place of tensors that nobody will read again."""

    kind: Kind
    name: str
    value: Any
    #: State of the scheduler, after the last step.
    scheduler: dict[str, Any] | None = None
    #: State of the request's generators and of those among the call's arguments, if the value is to be read.
    generators: tuple[torch.Tensor, ...] = ()
    #: Of a decoder, whose output is much larger: what it was called with.
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None


Log = tuple[Entry, ...]


@dataclass
class Scene:
    """What all runs on a rank share: the pipeline, what is set on it, and how it is called."""

    #: The object that has the models and schedulers.
    root: Any
    device: torch.device
    overlay: Overlay
    caches: StepCaches
    #: Makes what a forward is called with from a request; the generators among it belong to the call.
    call_forward: Callable[[Any, Run], Any]
    #: On the thread that runs tasks: what another thread has to do to be like it.
    adopt: Callable[[], Callable[[], None]]
    #: Empty caches that know tensors by address, where another request's may have been.
    forget: list[Callable[[], None]]
    #: Arguments of denoisers that are None where they let everything through.
    masks: tuple[str, ...] = ()
    #: Arguments of denoisers that forward leaves on the host.
    sent: tuple[str, ...] = ()
    #: Whether a denoiser that is called with several rows of one image has both branches of guidance among them.
    splits_rows: bool = False

    def put_on(self, attributes: State) -> None:
        """Before anything of a request runs; ``overlay.take_off`` is the end of it."""
        self.overlay.put_on(attributes)
        for forget in self.forget:
            forget()


class Run:
    """See :class:`gfdit.adapters.forward.seam.Listener`. Used by one thread at a time.

    One that ``decodes`` makes what decoders have made before again, and does not only stand in for it.
    """

    def __init__(
        self,
        scene: Scene,
        mode: Mode,
        request: Any,
        generators: list[torch.Generator],
        log: Log,
        decodes: bool = False,
        only_step: int | None = None,
    ) -> None:
        self.log: list[Entry] = list(log)
        self.num_steps = 0
        self.is_inside = False
        #: Whether noise was predicted with guidance by a method that can split it.
        self.splits_guidance = False
        #: Of a request with a mask, once forward has begun.
        self.inpainting: Inpainting | None = None
        #: Of such a request, if it makes no other one.
        self.only_step = only_step
        #: What the next noise prediction computes, if that is not all.
        self.prediction: Prediction | None = None
        self._scene = scene
        self._mode = mode
        self._generators = generators
        self._position = 0
        self._attributes: State = scene.overlay.fresh()
        self._first_caches: Share | None = None
        self._coroutine = Coroutine(partial(self._forward, request), "gfdit-forward")
        self._num_denoiser_calls = 0
        self._num_bytes = 0
        self._pauses = False
        self._pending: Pending | None = None
        self._instead: Callable[[], Any] | None = None
        self._decodes = decodes
        #: Whether something that a decoder has made is without values here.
        self.lacks_decoded = False
        self._replacements: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._waits = None if scene.device == _HOST else WithoutWaits()

    # From outside

    @property
    def has_ended(self) -> bool:
        return self._coroutine.has_ended

    @property
    def result(self) -> Any:
        return self._coroutine.result

    def advance(self) -> bool:
        """To the next cut, or the end; returns whether that was it. The first time: to where the log ends."""
        scene = self._scene
        scene.put_on(self._attributes)
        try:
            return self._coroutine.resume(scene.adopt())
        finally:
            self._attributes = scene.overlay.take_off()
            if self._first_caches is None:  # nothing was computed yet: replies of the log are no passes
                self._first_caches = self.caches()

    def to_denoiser(self) -> Pending | None:
        """To the next call of a denoiser, which waits to be made; None if a cut or the end comes first."""
        self._pauses, self._pending = True, None
        self.advance()
        self._pauses = False
        return self._pending

    def go_on(self, make: Callable[[], Any]) -> None:
        """With what ``make()`` returns for the call that waits, to the next call that does, cut or end."""
        self._instead = make

    def end(self) -> None:
        """Of a run that will not go on."""
        if not self._coroutine.has_ended:
            self._scene.put_on(self._attributes)
            try:
                self._coroutine.kill()
            finally:
                self._scene.overlay.take_off()

    @property
    def num_bytes(self) -> int:
        """That a suspended forward holds; looked at in its first steps, because later ones hold as much."""
        if self.num_steps < 2 or not self._num_bytes:
            self._num_bytes = self._coroutine.num_bytes()
        return self._num_bytes

    @property
    def settings(self) -> list[dict[str, Any]]:
        """What the request has set on its pipeline and models, but for what counts steps, and tensors."""
        settings = [{name: _setting(value) for name, value in own.items()} for own in self._attributes]
        return [{name: said for name, said in own.items() if said is not None} for own in settings]

    def caches(self) -> Share:
        """What step caches keep of this request."""
        return self._scene.caches.share_of(self._attributes[self._scene.overlay.num_modules :])

    @property
    def first_caches(self) -> Share:
        """What step caches kept of this request before its first step."""
        assert self._first_caches is not None, "this forward has begun"
        return self._first_caches

    def set_caches(self, attributes: Attributes) -> None:
        """What step caches are to know of this request."""
        self._attributes[self._scene.overlay.num_modules :] = attributes

    def num_timesteps(self) -> int | None:
        """Of the schedulers that the forward has set, the most that one has."""
        schedulers = [value for own in self._attributes for value in own.values() if is_scheduler(value)]
        lengths = [
            len(timesteps) for one in schedulers if (timesteps := getattr(one, "timesteps", None)) is not None
        ]
        return max(lengths, default=None)

    # On the coroutine's thread

    def _forward(self, request: Any) -> Any:
        seam.listen(self)
        with nullcontext() if self._waits is None else self._waits:
            return self._scene.call_forward(request, self)

    def call(
        self, kind: Kind, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make the call or answer it from the log, and stop where a task ends."""
        if kind is Kind.DENOISER:
            seam.report_schedulers(self._scene.root)
            args, kwargs = self._prepared(args), self._prepared(kwargs)
            self._before_denoiser(name, fn, args, kwargs)
        logged = kind is not Kind.STEP or self._mode.keep is Keep.COMPACT
        if logged and self._position < len(self.log):
            value = self._answer(kind, name, fn, args, kwargs)
        else:
            value = self._make(kind, name, fn, args, kwargs, logged)
        if kind is Kind.STEP:
            self.num_steps += 1
            if self._mode.cut is Cut.STEP and self._position == len(self.log):
                self._coroutine.suspend()
        return value

    def _before_denoiser(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if name in seam.PREDICTORS and (kwargs.get("do_true_cfg") or (args and args[0] is True)):
            self.splits_guidance = True
        if self._scene.splits_rows and num_rows(args, kwargs) > 1:
            self.splits_guidance = True
        self._num_denoiser_calls += 1
        if self._position == len(self.log) and (self._num_denoiser_calls == 1 or self._mode.cut is Cut.DENOISER):
            self._coroutine.suspend()
        if self._position == len(self.log) and self._pauses:
            self._pending = Pending(name, fn, args, kwargs)
            self._coroutine.suspend()

    def _make(
        self,
        kind: Kind,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        logged: bool,
    ) -> Any:
        instead, self._instead = self._instead, None
        value = self._inside(kind, instead or partial(fn, *args, **kwargs))
        if logged:
            self.log.append(self._entry(kind, name, value, fn, args, kwargs))
            self._position = len(self.log)
        return value

    def _entry(
        self,
        kind: Kind,
        name: str,
        value: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Entry:
        if kind in (Kind.DENOISER, Kind.DECODER) and self._mode.keep is Keep.COMPACT:
            inputs = _own((args, kwargs)) if kind is Kind.DECODER else None
            return Entry(kind, name, specs_of(value), inputs=inputs)
        generators = tuple(one.get_state() for one in self._generators_of(args, kwargs))
        if kind is not Kind.STEP:
            return Entry(kind, name, _own(value), generators=generators)
        scheduler = _state_of(_self_of(fn))
        self._forget_last_step(scheduler)
        return Entry(kind, name, _own(value), scheduler, generators)

    def _forget_last_step(self, scheduler: dict[str, Any]) -> None:
        """Nobody will read what the one before made, unless it was the last of another schedule than this one."""
        for index in range(len(self.log) - 1, -1, -1):
            if (entry := self.log[index]).kind is not Kind.STEP:
                continue
            goes_on = entry.scheduler is not None and entry.scheduler.get("timesteps") is scheduler.get(
                "timesteps"
            )
            value = specs_of(entry.value) if goes_on else entry.value
            generators = () if goes_on else entry.generators
            self.log[index] = Entry(entry.kind, entry.name, value, generators=generators)
            return

    def _answer(
        self, kind: Kind, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        entry = self.log[self._position]
        if (entry.kind, entry.name) != (kind, name):
            raise ReplayError(f"forward called {name} where it had called {entry.name}")
        self._position += 1
        if entry.scheduler is not None:
            _restore(_self_of(fn), entry.scheduler)
        if entry.inputs is not None:
            if self._decodes:
                given, named = entry.inputs
                return self._inside(kind, partial(fn, *given, **named))
            self.lacks_decoded = True
        if entry.generators:
            for generator, state in zip(self._generators_of(args, kwargs), entry.generators, strict=True):
                generator.set_state(state)
        return _own(past_of(entry.value, self._scene.device))

    def _inside(self, kind: Kind, make: Callable[[], Any]) -> Any:
        """Models wait for what they wait for, and cost nothing more; schedulers and forward itself do not."""
        self.is_inside = True
        try:
            with (
                nullcontext() if self._waits is None or kind is Kind.STEP else self._waits.paused(),
                predicting(self.prediction if kind is Kind.DENOISER else None),
            ):
                return make()
        finally:
            self.is_inside = False

    def _prepared(self, arguments: Any) -> Any:
        """Attention needs no mask that leaves nothing out, and what is sent to the device is sent once."""
        if isinstance(arguments, tuple):
            return tuple(self._prepared(value) for value in arguments)
        if not isinstance(arguments, dict):
            return arguments
        return {name: self._replaced(name, value) for name, value in arguments.items()}

    def _replaced(self, name: str, value: Any) -> Any:
        is_mask = name in self._scene.masks
        if not isinstance(value, torch.Tensor) or not (is_mask or name in self._scene.sent):
            return self._prepared(value) if isinstance(value, dict) else value
        if id(value) not in self._replacements:  # which is so before the first step
            instead = value.to(self._scene.device) if not is_mask else None if bool(value.all()) else value
            self._replacements[id(value)] = value, instead
        return self._replacements[id(value)][1]

    def _generators_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Generator]:
        yield from self._generators
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) and not any(leaf is own for own in self._generators):
                yield leaf


def _setting(value: Any) -> Any:
    """What can be compared of it."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return value if isinstance(value, (bool, float, str)) else None


def _own(value: Any) -> Any:
    """A copy: the log and the forward each have theirs, so that neither sees what the other changes in place."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor if isinstance(tensor, Past) else tensor.clone(), value
    )


def _self_of(step: Callable[..., Any]) -> Any:
    """The scheduler whose step :mod:`~gfdit.adapters.forward.seam` reports."""
    assert isinstance(step, partial)
    return step.args[0]


def _state_of(scheduler: Any) -> dict[str, Any]:
    """Its attributes. Schedulers replace their tensors, but count steps and shift their history in place."""
    return {name: _copied(value) for name, value in vars(scheduler).items()}


def _copied(value: Any) -> Any:
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return _Nested(_state_of(value)) if is_scheduler(value) else value


@dataclass
class _Nested:
    """The state of a scheduler inside of another one, which others know, too: it stays the same object."""

    state: dict[str, Any]


def _restore(scheduler: Any, state: dict[str, Any]) -> None:
    own = vars(scheduler)
    for name, value in state.items():
        if isinstance(value, _Nested):
            _restore(own[name], value.state)
        else:
            own[name] = _copied(value)
