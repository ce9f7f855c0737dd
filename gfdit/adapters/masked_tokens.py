"""A noise prediction for some of an image's tokens: attention takes the keys and values that the others had.

(FlashPS §3.1, with keys and values kept and not outputs, so that any later token may attend to them.) Which
tensors have a row for every token of the image, and where the rows come together again, is what a plan for
sequence parallelism says; so rows are chosen just before they would be split, and put back right after they were
gathered. In attention, after heads were exchanged, every rank has its own heads of all text tokens, which come
first, and of those of the image.

Shape suffixes: B batch, T text tokens, S image tokens, N those that are computed, H own heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.sym_node import DynamicInt
from torch.utils._pytree import tree_flatten, tree_unflatten
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.forward_context import get_forward_context

Layer = tuple[torch.Tensor, torch.Tensor]
#: Keys and values of a pass and layer, of image tokens that are not computed: (1 or B, S - N, H, D) twice.
LayerOf = Callable[[int, int], Layer]


class KnownAs(NamedTuple):
    """Keys and values that were kept in ``step``, in which all ranks of ``layout`` computed all tokens."""

    step: int
    layout: str


class KeptKeys:
    """What attention has last seen of a request's tokens on this rank, (B, T + S, H, D) twice for each layer.

    Nothing once it would be more than ``room_bytes``.
    """

    def __init__(self, known_as: KnownAs, room_bytes: int) -> None:
        self.known_as = known_as
        #: A prediction has one pass for each branch of guidance that this rank computes.
        self.passes: list[list[Layer]] = []
        self.num_bytes = 0
        self._room_bytes = room_bytes

    @property
    def is_whole(self) -> bool:
        return self.num_bytes <= self._room_bytes

    def begin_pass(self) -> None:
        self.passes.append([])

    def keep(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.num_bytes += key.nbytes + value.nbytes
        if self.is_whole:
            self.passes[-1].append((key.clone(), value.clone()))
        else:
            self.passes = [[]]


class KeysOfRequests:
    """Of all requests on this rank, ``limit_bytes`` at most: one for which there is no room keeps nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._by_request: dict[str, KeptKeys] = {}

    def has(self, request_id: str, known_as: KnownAs) -> bool:
        kept = self._by_request.get(request_id)
        return kept is not None and kept.is_whole and kept.known_as == known_as

    def of(self, request_id: str) -> KeptKeys:
        return self._by_request[request_id]

    def new(self, request_id: str, known_as: KnownAs) -> KeptKeys:
        """In place of the request's old ones, and empty."""
        self.drop(request_id)
        others = sum(kept.num_bytes for kept in list(self._by_request.values()) if kept.is_whole)
        self._by_request[request_id] = kept = KeptKeys(known_as, self.limit_bytes - others)
        return kept

    def drop(self, request_id: str) -> None:
        """Any thread may call this."""
        self._by_request.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._by_request)


class Prediction:
    """One of a request. Hooks call it, in every pass of the transformer (one for each branch of guidance) in the
    order of its methods; ``enter_block`` and ``attend`` for every block and layer."""

    #: int64 (N,); None: all.
    chosen: torch.Tensor | None = None

    def __init__(self) -> None:
        self._pass, self._layer = -1, -1
        self._num_tokens = 0

    def begin_pass(self) -> None:
        self._pass, self._layer = self._pass + 1, -1

    def choose(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Of a tensor that has S rows in ``dim``, those that are computed."""
        self._num_tokens = rows.size(dim)
        return rows if self.chosen is None else rows.index_select(dim, self.chosen)

    def enter_block(self, number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the ``number``-th block of the transformer is called with, by name."""
        return arguments

    def attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        """Keys and values (B, T + N, H, D) that a layer has made, to those it attends to, (B, T + S, H, D)."""
        self._layer += 1
        return self._attend(key, value)

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        raise NotImplementedError

    def put_back(self, rows: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) to (B, S, ...); ones where nothing was computed, of which any norm is a number."""
        if self.chosen is None:
            return rows
        whole = rows.new_ones((rows.shape[0], self._num_tokens, *rows.shape[2:]))
        return whole.index_copy_(1, self.chosen, rows)

    def _rows(self, num_text: int) -> torch.Tensor:
        """Of (B, T + S, H, D), those of text and chosen tokens."""
        assert self.chosen is not None
        return torch.cat((torch.arange(num_text, device=self.chosen.device), self.chosen + num_text))


class Keeping(Prediction):
    """Of all tokens, whose keys and values are kept."""

    def __init__(self, keys: KeptKeys) -> None:
        super().__init__()
        self._keys = keys

    def begin_pass(self) -> None:
        super().begin_pass()
        self._keys.begin_pass()

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        self._keys.keep(key, value)
        return key, value


class FromKept(Prediction):
    """Of ``chosen`` tokens, among those whose keys and values were kept."""

    def __init__(self, keys: KeptKeys, chosen: torch.Tensor) -> None:
        super().__init__()
        self._keys, self.chosen = keys, chosen

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        kept = self._keys.passes[self._pass][self._layer]
        rows = self._rows(kept[0].shape[1] - self._num_tokens)
        # In place: next time the same rows are written anew.
        return kept[0].index_copy_(1, rows, key), kept[1].index_copy_(1, rows, value)


class FromTemplate(Prediction):
    """Of ``chosen`` tokens; ``layer_of`` has keys and values of ``others``, which are all that are not.

    The first ``full_blocks`` blocks compute all tokens, so that there is time to load what later ones read
    (FlashPS §4.2; with keys and values no block can compute all after one that did not). Rows are in another order
    then: each of ``degree`` ranks begins with its share of those chosen, which it keeps.
    """

    def __init__(
        self, layer_of: LayerOf, chosen: torch.Tensor, others: torch.Tensor, full_blocks: int = 0, degree: int = 1
    ) -> None:
        super().__init__()
        self._layer_of, self.chosen, self._others = layer_of, chosen, others
        self._full_blocks, self._degree = full_blocks, degree
        self._order = _order(chosen, others, degree) if full_blocks else None
        self._is_narrow = not full_blocks
        self._lengths: dict[str, Any] = {}

    def begin_pass(self) -> None:
        super().begin_pass()
        self._is_narrow = not self._full_blocks

    def choose(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        if self._order is None:
            return super().choose(rows, dim)
        self._num_tokens = rows.size(dim)
        return rows.index_select(dim, self._order)

    def enter_block(self, number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self.chosen is not None
        if not self._full_blocks or number < self._full_blocks:
            return arguments
        num_own, num_kept = -(-self._num_tokens // self._degree), len(self.chosen) // self._degree
        num_text = arguments["encoder_hidden_states"].shape[1]
        if not self._is_narrow:
            self._is_narrow = True
            lengths = get_forward_context().sp_shard_metadata
            self._lengths = dict(lengths)
            lengths.update(dict.fromkeys(lengths, DynamicInt(len(self.chosen))))
        others = {name: arguments[name] for name in ("encoder_hidden_states", "temb") if name in arguments}
        narrow = partial(_narrow, num_text=num_text, num_own=num_own, num_kept=num_kept)
        return {name: narrow(value) for name, value in arguments.items()} | others

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        if not self._is_narrow:
            return key, value
        assert self.chosen is not None
        num_text = key.shape[1] - len(self.chosen)
        rows, others = self._rows(num_text), self._others + num_text
        made = []
        for own, other in zip((key, value), self._layer_of(self._pass, self._layer), strict=True):
            whole = own.new_empty((own.shape[0], num_text + self._num_tokens, *own.shape[2:]))
            whole.index_copy_(1, rows, own)
            made.append(whole.index_copy_(1, others, other.to(own.dtype).expand(len(own), -1, -1, -1)))
        return made[0], made[1]

    def put_back(self, rows: torch.Tensor) -> torch.Tensor:
        if self._order is None:
            return super().put_back(rows)
        if not self._is_narrow:
            return torch.empty_like(rows).index_copy_(1, self._order, rows)
        get_forward_context().sp_shard_metadata.update(self._lengths)
        return super().put_back(rows)


def _narrow(value: Any, num_text: int, num_own: int, num_kept: int) -> Any:
    """Of what a block is called with: of ``num_own`` image tokens the first ``num_kept``, also after the text."""
    leaves, spec = tree_flatten(value)
    of_image = [_dim_of(leaf, num_own) for leaf in leaves]
    if num_text == num_own:  # rotary embeddings come in pairs, those of the image first
        found = [number for number, dim in enumerate(of_image) if dim is not None]
        for number in found[-(-len(found) // 2) :]:
            of_image[number] = None
    narrowed = []
    for leaf, dim in zip(leaves, of_image, strict=True):
        if dim is not None:
            leaf = leaf.narrow(dim, 0, num_kept)
        elif (dim := _dim_of(leaf, num_text + num_own)) is not None:
            leaf = leaf.narrow(dim, 0, num_text + num_kept)
        narrowed.append(leaf)
    return tree_unflatten(narrowed, spec)


def _dim_of(leaf: Any, num_rows: int) -> int | None:
    """Which has so many rows; the last one of several has channels."""
    if not isinstance(leaf, torch.Tensor):
        return None
    sizes = leaf.shape[: max(leaf.ndim - 1, 1)]
    return sizes.index(num_rows) if num_rows in sizes else None


def _order(chosen: torch.Tensor, others: torch.Tensor, degree: int) -> torch.Tensor:
    """Of all tokens, that of ranks' shares one after the other, each with as many of those chosen, first."""
    num_own = -(-(len(chosen) + len(others)) // degree)
    num_kept = len(chosen) // degree
    shares = zip(chosen.split(num_kept), others.split(num_own - num_kept), strict=True)
    return torch.cat([part for share in shares for part in share])


class Together(Prediction):
    """Those of several requests as rows of one pass, each with its own mask (FlashPS §4.3).

    Every row has as many tokens as the one with most; of others the last one is there again, and what that makes
    is not looked at. What rows would share, (S, width), is side by side for each of them, (N, B * width): so it is
    split among ranks as ever.
    """

    def __init__(self, parts: Sequence[Prediction], num_rows: Sequence[int]) -> None:
        """``num_rows`` of the pass are of each of ``parts``, which leave tokens out in all blocks."""
        super().__init__()
        self._parts, self._rows_of = parts, list(num_rows)
        self._lengths = [len(part.chosen) for part in parts if part.chosen is not None]
        assert len(self._lengths) == len(parts), "each leaves tokens out"
        self._length = max(self._lengths)
        self._widths: set[int] = set()

    def begin_pass(self) -> None:
        super().begin_pass()
        for part in self._parts:
            part.begin_pass()

    def choose(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        if dim:
            chosen = zip(self._parts, rows.split(self._rows_of), strict=True)
            return torch.cat([self._padded(part.choose(own, dim), dim) for part, own in chosen])
        made = [self._padded(part.choose(rows, dim), dim) for part in self._parts]
        return self.side_by_side(
            [one for one, count in zip(made, self._rows_of, strict=True) for _ in range(count)]
        )

    def _padded(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        last, missing = rows.narrow(dim, -1, 1), self._length - rows.size(dim)
        return torch.cat((rows, last.expand(*(missing if at == dim else -1 for at in range(rows.ndim)))), dim)

    def side_by_side(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of each row, (N, width) each."""
        whole = torch.cat(list(values), dim=-1)
        self._widths.add(whole.shape[-1])
        return whole

    @property
    def num_rows(self) -> int:
        return sum(self._rows_of)

    def of_rows(self, value: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The opposite; None if rows share ``value``."""
        if value.shape[-1] not in self._widths:
            return None
        return value.chunk(self.num_rows, dim=-1)

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        made = []
        parts = zip(self._parts, self._lengths, key.split(self._rows_of), value.split(self._rows_of), strict=True)
        for part, length, own_key, own_value in parts:
            end = key.shape[1] - self._length + length
            made.append(part.attend(own_key[:, :end], own_value[:, :end]))
        keys, values = zip(*made, strict=True)
        return torch.cat(keys), torch.cat(values)

    def put_back(self, rows: torch.Tensor) -> torch.Tensor:
        parts = zip(self._parts, self._lengths, rows.split(self._rows_of), strict=True)
        return torch.cat([part.put_back(own[:, :length]) for part, length, own in parts])


class Recording(Prediction):
    """Of all tokens of a template; ``passes`` has the image's keys and values of each layer, (B, S, H, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[Layer]] = []

    def begin_pass(self) -> None:
        super().begin_pass()
        self.passes.append([])

    def _attend(self, key: torch.Tensor, value: torch.Tensor) -> Layer:
        self.passes[-1].append((key[:, -self._num_tokens :].clone(), value[:, -self._num_tokens :].clone()))
        return key, value


class _Here(threading.local):
    prediction: Prediction | None = None


_here = _Here()


def current() -> Prediction | None:
    """That this thread makes; None where all tokens are computed and nothing is kept."""
    return _here.prediction


@contextmanager
def predicting(prediction: Prediction | None) -> Iterator[None]:
    before, _here.prediction = _here.prediction, prediction
    try:
        yield
    finally:
        _here.prediction = before


def begin_pass(*_: Any) -> None:
    """Forward pre-hook of a transformer."""
    if (prediction := _here.prediction) is not None:
        prediction.begin_pass()


def enter_block(number: int, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the ``number``-th block of a transformer."""
    if (prediction := _here.prediction) is None:
        return None
    return args, prediction.enter_block(number, kwargs)


def blocks_of(transformer: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """In the order in which it calls them, with the number of attention layers in each."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    found = [(block, _num_layers(block)) for blocks in lists for block in blocks]
    return [(block, num_layers) for block, num_layers in found if num_layers]


def _num_layers(block: torch.nn.Module) -> int:
    return sum(isinstance(module, Attention) for module in block.modules())


def put_back(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of the module where tokens come together; some return a bias beside them."""
    if (prediction := _here.prediction) is None:
        return output
    rows, *others = output if isinstance(output, tuple) else (output,)
    whole = prediction.put_back(rows)
    return (whole, *others) if isinstance(output, tuple) else whole


def watch_attention(attention: Any) -> None:
    """``attention`` is a layer's backend, which gets its keys and values when nothing else is done to them."""
    original = attention.forward

    def forward(query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        if not torch.compiler.is_compiling() and (prediction := _here.prediction) is not None:
            key, value = prediction.attend(key, value)
            if attn_metadata is not None and (mask := attn_metadata.attn_mask) is not None:
                attn_metadata = replace(attn_metadata, attn_mask=_of_all(mask, key.shape[1]))
        return original(query, key, value, attn_metadata)

    attention.forward = forward


def _of_all(mask: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Of keys, (B, T + N) to (B, T + S): what is left out is text."""
    if mask.ndim != 2:
        raise ValueError(f"attention with a mask of {mask.ndim} dimensions cannot leave tokens out")
    return torch.nn.functional.pad(mask.bool(), (0, num_keys - mask.shape[1]), value=True)


def watch_rotation(rotation: Any) -> None:
    """``rotation`` is vLLM-Omni's rotary embedding, which rotates all rows by the same angles."""
    original = rotation.forward

    def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and isinstance(prediction := _here.prediction, Together):
            cosines, sines = prediction.of_rows(cos), prediction.of_rows(sin)
            if cosines is not None and sines is not None:  # as one row after the other
                return original(x.flatten(0, 1).unsqueeze(0), torch.cat(cosines), torch.cat(sines)).view_as(x)
        return original(x, cos, sin)

    rotation.forward = forward


def watch_positions(transformer: Any) -> None:
    """Of one that makes its rotary embeddings of positions, those of text before those of the image."""
    original = transformer.pos_embed.forward

    def of_text(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(prediction := _here.prediction, Together):
            return args, kwargs | {"txt_ids": prediction.side_by_side([kwargs["txt_ids"]] * prediction.num_rows)}
        return None

    def forward(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(prediction := _here.prediction, Together) and (rows := prediction.of_rows(ids)) is not None:
            cosines, sines = zip(*map(original, rows), strict=True)
            return prediction.side_by_side(cosines), prediction.side_by_side(sines)
        return original(ids)

    transformer.register_forward_pre_hook(of_text, with_kwargs=True)
    transformer.pos_embed.forward = forward
