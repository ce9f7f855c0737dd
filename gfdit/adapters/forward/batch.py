"""Noise predictions of several requests as one call: their arguments put together, row by row.

A pipeline calls its denoiser with tensors that have a row for every image, lists with an entry for every image,
and what all images share. Which is which is seen by its length; what cannot be put together runs one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gfdit.adapters.masked_tokens import FromKept, FromTemplate

if TYPE_CHECKING:
    from gfdit.adapters.forward.run import Run

# Positions of tokens follow from the size alone: equal sizes, equal positions.
_SHARED_SUFFIXES = ("_ids", "_rotary_emb")
_SHAPES_SUFFIX = "_shapes"
_MASK_SUFFIX = "_mask"
_LATENTS = "hidden_states"
_TEXT = "encoder_hidden_states"
#: Of requests that compute some of their tokens together, the least that one has of the most.
LEAST_SHARE = 0.5


class NotAlikeError(Exception):
    """These calls cannot be one; says why."""


class Pending(NamedTuple):
    """A call of a denoiser that waits to be made."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Waiting = tuple["Run", Pending]


def groups_of(waiting: Sequence[Waiting]) -> list[list[Waiting]]:
    """Two or more that may be one call, each group in the order given.

    Rows of edits are as long as the longest, so those in a group have about as many tokens under their masks. Keys
    that a run has kept are those of its own text, as long as it is.
    """
    by_kind: dict[Any, list[tuple[int, int]]] = {}
    for number, (run, pending) in enumerate(waiting):
        prediction = run.prediction
        if prediction is None or isinstance(prediction, (FromKept, FromTemplate)):
            text = _text_lengths(pending.kwargs) if isinstance(prediction, FromKept) else ()
            chosen = None if prediction is None else prediction.chosen
            num_tokens = 0 if chosen is None else len(chosen)
            by_kind.setdefault((type(prediction), text), []).append((num_tokens, number))
    groups: list[list[int]] = []
    for members in by_kind.values():
        most = -1
        for num_tokens, number in sorted(members, reverse=True):
            if most < 0 or num_tokens < LEAST_SHARE * most:
                most = num_tokens
                groups.append([])
            groups[-1].append(number)
    return [[waiting[number] for number in sorted(group)] for group in groups if len(group) > 1]


def _text_lengths(arguments: dict[str, Any]) -> tuple[int, ...]:
    """Of all branches of guidance."""
    lengths: list[int] = []
    for name, value in arguments.items():
        if isinstance(value, dict):
            lengths += _text_lengths(value)
        elif name == _TEXT and isinstance(value, torch.Tensor):
            lengths.append(value.shape[1])
    return tuple(lengths)


def together(calls: Sequence[Pending], text_multiple: int = 1) -> Callable[[int], Any]:
    """What each of ``calls`` returns, by its number; the first to ask makes one call of all of them.

    Texts in a list must be of one length, counted in multiples of ``text_multiple``: the denoiser pads them.
    Raises :class:`NotAlikeError`.
    """
    first = calls[0]
    if len({call.name for call in calls}) > 1:
        raise NotAlikeError("they call different denoisers")
    rows = [num_rows(call.args, call.kwargs) for call in calls]
    if len({_listed_lengths(call, text_multiple) for call in calls}) > 1:
        raise NotAlikeError("texts in a list are of different lengths")
    args = _joined("", [call.args for call in calls], rows)
    kwargs = _joined("", [call.kwargs for call in calls], rows)
    made: list[Any] = []

    def result(number: int) -> Any:
        if not made:
            made.extend(_parted(first.fn(*args, **kwargs), rows))
        return made[number]

    return result


def _listed_lengths(call: Pending, multiple: int) -> frozenset[int]:
    """Of tensors (tokens, width) in lists: a batch of them is padded to the longest."""
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, list)]
    texts = [text for value in lists for text in value if isinstance(text, torch.Tensor) and text.ndim == 2]
    return frozenset(-(-len(text) // multiple) for text in texts)


def num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Images of one call: rows of its latents, or entries of a list of them."""
    named = kwargs.get("positive_kwargs", kwargs)
    latents = named.get(_LATENTS, args[0] if args else None)
    if isinstance(latents, torch.Tensor):
        return latents.shape[0]
    if isinstance(latents, list):
        return len(latents)
    positional = [argument[_LATENTS] for argument in args if isinstance(argument, dict) and _LATENTS in argument]
    if not positional:
        raise NotAlikeError("nobody knows which of the arguments are latents")
    return positional[0].shape[0]


def _joined(name: str, values: list[Any], rows: list[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise NotAlikeError(f"{name} is of different types")
    if isinstance(first, torch.Tensor):
        return _joined_tensors(name, values, rows)
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise NotAlikeError(f"{name or 'calls'} have different arguments")
        values = _padded(values)
        return {key: _joined(key, [value[key] for value in values], rows) for key in first}
    if isinstance(first, list) and all(len(value) == count for value, count in zip(values, rows, strict=True)):
        if name.endswith(_SHAPES_SUFFIX) and any(entry != first[0] for value in values for entry in value):
            raise NotAlikeError(f"{name} differ")  # those of the first row are taken for all
        return [entry for value in values for entry in value]
    if isinstance(first, (list, tuple)):
        if len({len(value) for value in values}) > 1:
            raise NotAlikeError(f"{name} is of different lengths")
        return type(first)(_joined(name, list(parts), rows) for parts in zip(*values, strict=True))
    if all(value is first or bool(value == first) for value in values):
        return first
    raise NotAlikeError(f"{name or 'an argument'} differs")


def _joined_tensors(name: str, tensors: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
    first = tensors[0]
    have_rows = all(tensor.ndim and tensor.shape[0] == count for tensor, count in zip(tensors, rows, strict=True))
    if len({(tensor.shape[1:] if have_rows else tensor.shape) for tensor in tensors}) > 1:
        raise NotAlikeError(f"shapes of {name} differ")
    if have_rows:
        return torch.cat(tensors)
    if name.endswith(_SHARED_SUFFIXES) or all(tensor is first for tensor in tensors):
        return first
    if first.device.type == "cpu" and all(torch.equal(tensor, first) for tensor in tensors):
        return first
    raise NotAlikeError(f"{name} has no row for each image")


def _padded(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts of different lengths made equally long, where the denoiser takes a mask beside them."""
    padded = [dict(call) for call in calls]
    for mask_name in [name for name in calls[0] if name.endswith(_MASK_SUFFIX)]:
        name = mask_name.removesuffix(_MASK_SUFFIX)
        texts = [text for call in calls if isinstance(text := call.get(name), torch.Tensor) and text.ndim == 3]
        masks = [call[mask_name] for call in calls]
        if len(texts) < len(calls):
            continue
        length = max(text.shape[1] for text in texts)
        if min(text.shape[1] for text in texts) == length and len({mask is None for mask in masks}) == 1:
            continue
        for call, text, mask in zip(padded, texts, masks, strict=True):
            if mask is None:
                mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
            missing = length - text.shape[1]
            call[name] = torch.nn.functional.pad(text, (0, 0, 0, missing))
            call[mask_name] = torch.nn.functional.pad(mask, (0, missing))
    return padded


def _parted(value: Any, rows: list[int]) -> list[Any]:
    total = sum(rows)
    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == total:
        return list(value.split(rows))
    if isinstance(value, list) and len(value) == total:
        starts = [sum(rows[:index]) for index in range(len(rows))]
        return [value[start : start + count] for start, count in zip(starts, rows, strict=True)]
    if isinstance(value, (tuple, list)):
        by_part = [_parted(part, rows) for part in value]
        return [type(value)(parts) for parts in zip(*by_part, strict=True)]
    return [value for _ in rows]
