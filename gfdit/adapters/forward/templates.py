"""What is kept of templates, as the forward of an edit writes and reads it: keys and values of their image tokens.

(FlashPS §3.1 and §4.2.) What a template looks like before any step is known without running those before it, so
each step is recorded by itself, on any rank. A rank writes the heads that it has under the layout it runs in, and
reads those it has under another one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from gfdit.adapters.forward.inpainting import edit_options_of
from gfdit.adapters.forward.known import images_of
from gfdit.adapters.masked_tokens import FromTemplate, Layer, Recording
from gfdit.core.cost.load_plan import leading_full_blocks, steady_step_s
from gfdit.templates.budget import Precision
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.rows import gather, scales_of
from gfdit.templates.store import Reading, TemplateStore
from gfdit.templates.units import Unit

#: What layers that are loaded ahead of their use may take of a device.
AHEAD_BYTES = 3 << 29
#: Kinds of steps whose time is remembered.
MAX_KINDS = 1000
#: So many times longer a step has to be than it could for another number of leading blocks.
WORTH_IT = 1.1


def template_of(request: Any, od_config: Any) -> TemplateKey:
    """Of all that keys and values of a template depend on; of vLLM-Omni's request and configuration."""
    fields, sampling = dict(request.prompt), request.sampling_params
    options = edit_options_of(request)
    prompt = fields.get("prompt") if options.template_prompt is None else options.template_prompt
    lora = sampling.lora_request
    extra = {name: value for name, value in (sampling.extra_args or {}).items() if name != "gfdit"}
    return TemplateKey.of(
        image=[(one.size, one.convert("RGB").tobytes()) for one in images_of(request)],
        model=[str(od_config.model), str(od_config.revision), str(od_config.dtype)],
        size=(sampling.width, sampling.height),
        sigmas=(sampling.num_inference_steps, sampling.sigmas),
        prompts=(prompt, fields.get("negative_prompt"), sampling.max_sequence_length),
        guidance=sampling.guidance_scale,
        noise=options.template_seed,
        lora=None if lora is None else (lora.lora_name, lora.lora_path, sampling.lora_scale),
        quantisation=str(od_config.quantization_config),
        others=sorted(map(repr, extra.items())),
    )


class Place(NamedTuple):
    """Which part of a template this rank has to do with in a step."""

    template: TemplateKey
    step: int
    #: Of guidance, in the order of this rank's passes.
    branches: tuple[int, ...]
    heads: tuple[int, ...]


class FullBlocks(NamedTuple):
    """Leading blocks that compute all tokens, with so many attention layers, at a sequence-parallel degree."""

    num_blocks: int
    num_layers: int
    degree: int


NO_FULL_BLOCKS = FullBlocks(0, 0, 1)


class Stopwatch:
    """Seconds of what is launched between two calls; on a GPU known once it is done, and nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._begin: Any = self._now()
        self._end: Any = None

    def stop(self) -> None:
        self._end = self._now()

    @property
    def seconds(self) -> float | None:
        if not self._is_gpu:
            return None if self._end is None else self._end - self._begin
        if self._end is None or not self._end.query():
            return None
        return self._begin.elapsed_time(self._end) / 1e3

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Pace:
    """What was measured last of full steps, by what they are like."""

    def __init__(self) -> None:
        self._steps: OrderedDict[Any, tuple[Stopwatch, float | None]] = OrderedDict()
        self.load_s_per_byte: float | None = None
        #: That computed all tokens in the step before.
        self.num_full_blocks = 0

    def begin(self, kind: Any, device: torch.device) -> Stopwatch:
        """Stop what it returns."""
        self._steps[kind] = watch, _ = Stopwatch(device), self.seconds(kind)
        if len(self._steps) > MAX_KINDS:
            self._steps.popitem(last=False)
        return watch

    def seconds(self, kind: Any) -> float | None:
        """None before any is through."""
        watch, before = self._steps.get(kind, (None, None))
        return before if watch is None or watch.seconds is None else watch.seconds


class Templates:
    """One per rank."""

    def __init__(self, store: TemplateStore, num_full_blocks: int | None = None) -> None:
        self.store = store
        self.thread = ThreadPoolExecutor(1, "gfdit-templates")
        self._writer = ThreadPoolExecutor(1, "gfdit-recordings")
        self._written: Future[None] | None = None
        self._by_request: dict[str, Loads] = {}
        #: Leading blocks that compute all tokens; None: as many as steps are fastest with.
        self.num_full_blocks = num_full_blocks
        #: Layers that are on their way to the device while another one is computed; None: as many as there is
        #: room for.
        self.num_ahead: int | None = None
        #: Whether layers of the next step follow.
        self.crosses_steps = True
        self.pace = Pace()

    def of(self, request_id: str, chosen: torch.Tensor) -> Loads:
        """What the request reads; ``chosen`` are the tokens that it computes, int64 (N,)."""
        if request_id not in self._by_request:
            self._by_request[request_id] = Loads(self, chosen)
        return self._by_request[request_id]

    def drop(self, request_id: str) -> None:
        """Any thread may call this."""
        if (loads := self._by_request.pop(request_id, None)) is not None:
            self.thread.submit(loads.close)

    def record(self, place: Place, recording: Recording, precision: Precision) -> None:
        """Have what a pass over the template has shown written; waits for the one before."""
        # (layers, 2, S, H, D) of each branch, of the first image: all are the same.
        passes = [
            torch.stack([torch.stack((key[0], value[0])) for key, value in layers]).cpu()
            for layers in recording.passes
        ]
        self.flush()
        self._written = self._writer.submit(self._write, place, passes, precision)

    def flush(self) -> None:
        """Until all that was recorded is kept, or refused."""
        if self._written is not None:
            self._written.result()

    def _write(self, place: Place, passes: list[torch.Tensor], precision: Precision) -> None:
        for branch, values in zip(place.branches, passes, strict=True):
            for number, head in enumerate(place.heads):
                key = UnitKey(place.template, place.step, branch, head)
                self.store.put(key, values[..., number, :].contiguous(), precision)
        self.store.save(place.template)


class Loads:
    """What a request reads, loaded ahead of its use, and of the next step when this one is through.

    On a GPU layers come on a stream of their own; that was never run on one.
    """

    def __init__(self, templates: Templates, chosen: torch.Tensor) -> None:
        self._templates = templates
        self._chosen = chosen
        self._device = chosen.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reading: Reading | None = None
        self._units: dict[Place, Passes | None] = {}
        self._tokens: dict[int, Tokens] = {}
        self._upcoming: Iterator[Item] = iter(())
        self._ahead: deque[tuple[Item, Future[Loaded | None]]] = deque()
        self._planned: int | None = None

    def has(self, place: Place) -> bool:
        """Whether all of it is there; it stays so until the next step has begun."""
        if (units := self._units.get(place)) is None and place in self._units:  # by now it may be
            self._drop_ahead()
            del self._units[place]
        # The thread may have much to do before it gets to this.
        return units is not None or self._templates.thread.submit(self._found, place).result() is not None

    def num_full_blocks(self, place: Place, full_s: float | None, layers: Sequence[int]) -> int:
        """With how many leading blocks a step of a place that is there is fastest; ``layers`` are those of each.

        ``full_s`` is what a step takes that computes all tokens.
        """
        if (planned := self._templates.num_full_blocks) is not None:
            return planned
        passes, s_per_byte = self._units[place], self._templates.pace.load_s_per_byte
        if passes is None or full_s is None or s_per_byte is None:
            return 0
        num_layers, _, num_tokens, _ = passes[0][0].values.shape
        layer_s = full_s / (len(passes) * num_layers)
        share = len(self._chosen) / num_tokens
        num_bytes = (1 - share) * len(place.heads) * passes[0][0].values[0].nbytes
        # Rounded, so that few are new.
        cached_s, full_s, load_s = (
            float(f"{each:.1e}") for each in (share * layer_s, layer_s, num_bytes * s_per_byte)
        )
        steps = num_layers, cached_s, full_s, load_s, self._num_ahead(passes)
        best = leading_full_blocks(*steps)
        # Another number than in the step before makes what is on its way useless.
        if self._planned is None or steady_step_s(self._planned, *steps) > WORTH_IT * steady_step_s(best, *steps):
            self._planned = best
        return bisect_left(list(accumulate(layers, initial=0)), self._planned)

    def prediction(
        self, place: Place, next_place: Place | None, full: FullBlocks = NO_FULL_BLOCKS
    ) -> FromTemplate:
        """Of a place that is there. ``next_place`` may be what comes next."""
        passes = self._units[place]
        assert passes is not None, "the caller has asked"
        num_tokens = passes[0][0].values.shape[2]
        if num_tokens % full.degree or self._tokens_of(num_tokens, full.degree).others.numel() == 0:
            full = NO_FULL_BLOCKS
        tokens = self._tokens_of(num_tokens, full.degree)
        expected = (place, 0, full.num_layers, full.degree)
        if not self._ahead or self._ahead[0][0] != expected:  # nothing of it is on its way
            self._drop_ahead()
            self._upcoming = _items(place, passes, full)
        if next_place is not None:
            self._templates.thread.submit(self._found, next_place)  # behind what this step needs
        if next_place is not None and self._templates.crosses_steps:
            self._upcoming = chain(self._upcoming, _items(next_place, passes, full))
        for known in list(self._units):
            if known not in (place, next_place):
                del self._units[known]
        layer_of = partial(self._layer, place, full.degree)
        return FromTemplate(layer_of, tokens.chosen, tokens.on_device, full.num_blocks, full.degree)

    def _layer(self, place: Place, degree: int, pass_: int, layer: int) -> Layer:
        num_ahead = self._num_ahead(self._units[place])
        while len(self._ahead) <= num_ahead and (item := next(self._upcoming, None)) is not None:
            self._ahead.append((item, self._templates.thread.submit(self._load, *item)))
        item, future = self._ahead.popleft()
        assert item == (place, pass_, layer, degree), f"{item} is loaded where {place}, {pass_}, {layer} is due"
        loaded = future.result()
        assert loaded is not None, "what was found stays"
        values = loaded.values
        if loaded.event is not None:
            torch.cuda.current_stream(self._device).wait_event(loaded.event)
            values.record_stream(torch.cuda.current_stream(self._device))
        if loaded.scales is not None:
            values = values.float() * loaded.scales.to(self._device)
        key, value = values.unbind(1)
        return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)

    def close(self) -> None:
        """On the thread."""
        self._drop_ahead()
        self._units.clear()
        if self._reading is not None:
            self._reading.close()

    def _num_ahead(self, passes: Passes | None) -> int:
        if (num_ahead := self._templates.num_ahead) is not None or passes is None:
            return num_ahead or 0
        layer_bytes = len(passes[0]) * passes[0][0].values[0].nbytes
        return max(1, AHEAD_BYTES // layer_bytes)

    def _drop_ahead(self) -> None:
        for _, future in self._ahead:
            future.cancel()  # or others would wait for what nobody wants
        self._ahead.clear()
        self._upcoming = iter(())

    def _tokens_of(self, num_tokens: int, degree: int) -> Tokens:
        """As many are computed as ``degree`` divides."""
        if degree not in self._tokens:
            chosen = self._chosen.cpu()
            is_other = torch.ones(num_tokens, dtype=torch.bool)
            others = is_other.index_fill_(0, chosen, False).nonzero().flatten()
            num_more = -len(chosen) % degree
            chosen, others = torch.cat((chosen, others[:num_more])), others[num_more:]
            self._tokens[degree] = Tokens(chosen.to(self._device), others, others.to(self._device))
        return self._tokens[degree]

    # On the thread

    def _found(self, place: Place) -> Passes | None:
        if place not in self._units:
            if self._reading is None:
                self._reading = self._templates.store.reading(place.template)
            found = [self._reading.heads(place.step, branch, place.heads) for branch in place.branches]
            passes = [units for units in found if units is not None]
            self._units[place] = passes if len(passes) == len(found) else None
        return self._units[place]

    def _load(self, place: Place, pass_: int, layer: int, degree: int) -> Loaded | None:
        """Rows of tokens that are not computed are gathered on the host: the fewer, the less there is to copy."""
        if (passes := self._found(place)) is None:
            return None
        units, rows, start_s = passes[pass_], self._tokens[degree].others, time.perf_counter()
        shape = (1, len(units), 2, len(rows), units[0].values.shape[-1])
        on_gpu, event = self._stream is not None, None
        values = torch.empty(shape, dtype=units[0].values.dtype, pin_memory=on_gpu)
        values = gather(units, rows, blocks=range(layer, layer + 1), out=values)[0]
        if on_gpu:
            with torch.cuda.stream(self._stream):
                values = values.to(self._device, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            event.synchronize()  # this thread has nothing else to do
        self._templates.pace.load_s_per_byte = (time.perf_counter() - start_s) / max(values.nbytes, 1)
        scales = scales_of(units)
        return Loaded(values, None if scales is None else scales[layer], event)


#: By pass and head.
Passes = list[list[Unit]]
#: A layer of a pass, as a degree splits its tokens.
Item = tuple[Place, int, int, int]


class Tokens(NamedTuple):
    """``chosen`` are computed, on the device; ``others`` are on the host."""

    chosen: torch.Tensor
    others: torch.Tensor
    on_device: torch.Tensor


class Loaded(NamedTuple):
    """``values`` (H, 2, S - N, D) are there once ``event`` is; to be multiplied by ``scales`` (H, 2, 1, 1)."""

    values: torch.Tensor
    scales: torch.Tensor | None
    event: torch.cuda.Event | None


def _items(place: Place, passes: Passes, full: FullBlocks) -> Iterator[Item]:
    for number, units in enumerate(passes):
        for layer in range(full.num_layers, len(units[0].values)):
            yield place, number, layer, full.degree
