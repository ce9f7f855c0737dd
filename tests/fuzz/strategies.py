"""Hypothesis strategies: any JSON, and any value of a type that messages are made of."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutation import ODD_VALUES

ODD = st.sampled_from(ODD_VALUES)
ANY_TEXT = st.text(max_size=12)
"""Also halves of surrogate pairs, which JSON can escape."""
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    ODD | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)

_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # what UTF-8 has
_PLAIN: Mapping[type, st.SearchStrategy[Any]] = types.MappingProxyType(
    {
        int: _INT64,
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: _TEXT,
        bytes: st.binary(max_size=40),
        types.NoneType: st.none(),
    }
)
_PLAIN_JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of([*_PLAIN.values()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=4,
)


def fields(
    good: Mapping[str, st.SearchStrategy[Any]],
    optional: Mapping[str, st.SearchStrategy[Any]] = types.MappingProxyType({}),
) -> st.SearchStrategy[dict[str, Any]]:
    """An object with these fields, of which one may be anything, and one more may be there."""

    def spoilt(found: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sampled_from([*found, "unknown"]) if found else st.just("unknown")
        return st.one_of(
            st.just(found),
            st.just(found),
            st.builds(lambda name, value: {**found, name: value}, names, ANY_JSON),
            st.builds(lambda name: {key: value for key, value in found.items() if key != name}, names),
        )

    return st.fixed_dictionaries(dict(good), optional=dict(optional)).flatmap(spoilt)


def dumped(tree: Any) -> bytes:
    """As JSON; of an integer with more digits than Python writes, that."""
    try:
        return json.dumps(tree).encode()
    except ValueError:
        return b"9" * 5000


@cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Of a type: structs, named tuples, dataclasses of msgspec, unions, containers."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is Any:
        return _PLAIN_JSON
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(one) for one in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[values_of(one) for one in arguments])
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = typing.get_type_hints(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        names = kind._fields  # type: ignore[attr-defined]
    else:
        names = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    return st.builds(kind, **{name: values_of(hints[name]) for name in names})
