"""Dictionaries that do not grow for ever: a server may be asked for any size, and lives for months."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class AnswerCache(dict[Key, Value]):
    """Answers that can be worked out again, at most ``max_entries``: one more, and the others are forgotten.

    Reading one costs what it costs a dictionary.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._max_entries:
            self.clear()
        super().__setitem__(key, value)


class RecentDict(Generic[Key, Value]):
    """What was learned by key, at most ``max_entries``, an even number; what is read or written stays longest.

    It is kept in two halves. What is used moves to the newer one; once that is full, it becomes the older one, and
    what was left there is forgotten: it was not used while ``max_entries / 2`` others were. So nothing is kept in
    order, and using a value costs little more than a look into a dictionary. A value cannot be None.
    """

    __slots__ = ("_max_newer", "_newer", "_older")

    def __init__(self, max_entries: int) -> None:
        self._max_newer = max_entries // 2
        self._newer: dict[Key, Value] = {}
        self._older: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def items(self) -> Iterator[tuple[Key, Value]]:
        """Those not used for longest first, roughly."""
        yield from self._older.items()
        yield from self._newer.items()

    def get(self, key: Key) -> Value | None:
        if (value := self._newer.get(key)) is None and (value := self._older.pop(key, None)) is not None:
            self[key] = value
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self._newer) >= self._max_newer and key not in self._newer:
            self._older, self._newer = self._newer, {}
        self._older.pop(key, None)
        self._newer[key] = value
