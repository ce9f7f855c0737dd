"""Reading JSON that people write by hand: each field is checked and each error names place and field."""

from __future__ import annotations

import json
import reprlib
import sys
from typing import Any

LARGEST_INTEGER = 2**53  # that every JSON reader keeps exactly
_MISSING: Any = object()


def parse_json(text: str | bytes, where: str) -> Any:
    """Raises ``ValueError`` naming ``where`` for what is not JSON, and for JSON too deep to read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{where}: not JSON: {error.msg} at {place}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


MAX_DEPTH = 32
"""Of objects and lists within each other: more than anybody writes, less than Python can copy and pickle."""


def check_plain(value: Any, name: str) -> None:
    """Raise ``ValueError`` naming ``name`` for what is nested too deep, or holds halves of surrogate pairs."""
    waiting = [(value, 0)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, str):
            if has_half_pairs(found):
                raise ValueError(f"{name} must be text that UTF-8 can carry, got {shown(found)}")
        elif isinstance(found, (dict, list, tuple)):
            if depth == MAX_DEPTH:
                raise ValueError(f"{name} must not be nested more than {MAX_DEPTH} deep")
            inner = [*found, *found.values()] if isinstance(found, dict) else found
            waiting += [(one, depth + 1) for one in inner]


def one_line(error: object) -> str:
    """What ``error`` says, in characters that can be printed and sent, and not more than a line of them."""
    text = " ".join(str(error).split())
    return shortened(text.encode("ascii", "backslashreplace").decode() if has_half_pairs(text) else text, 300)


def has_half_pairs(text: str) -> bool:
    """Halves of surrogate pairs, which JSON can escape, are no characters: they cannot be sent as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


class JsonFields:
    """The fields of one JSON object; ``where`` names the object in every error (``file: entries[3]``)."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: must be an object, got {shown(value)}")
        self._values: dict[str, Any] = dict(value)
        self._known: list[str] = []
        self._where = where

    def error(self, name: str, message: str) -> ValueError:
        return ValueError(f"{self._where}: field {name!r} {message}")

    def take(self, name: str, default: Any = _MISSING) -> Any:
        self._known.append(name)
        value = self._values.pop(name, default)
        if value is _MISSING:
            raise self.error(name, "is missing")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        value = self.take(name, default)
        if not isinstance(value, str) or not value or has_half_pairs(value):
            raise self.error(name, f"must be a non-empty string, got {shown(value)}")
        return value

    def text_or_none(self, name: str) -> str | None:
        """A non-empty string; None if it is null or left out."""
        return self.take(name, None) if self._values.get(name) is None else self.text(name)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {shown(value)}")
        return value

    def integer(
        self, name: str, default: Any = _MISSING, *, minimum: int | None = 1, maximum: int = LARGEST_INTEGER
    ) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
            bound = "" if minimum is None else f" of at least {minimum}"
            raise self.error(name, f"must be an integer{bound}, got {shown(value)}")
        if abs(value) > maximum:
            raise self.error(name, f"must be an integer of at most {maximum}, got {shown(value)}")
        return value

    def integer_or_none(self, name: str) -> int | None:
        """An integer of at least 1; None if it is null or left out."""
        return self.take(name, None) if self._values.get(name) is None else self.integer(name)

    def number_or_none(self, name: str) -> float | None:
        """A finite number above zero; None if it is null or left out."""
        return self.take(name, None) if self._values.get(name) is None else self.number(name)

    def number(self, name: str, *, positive: bool = True) -> float:
        """A finite number above zero, or at least zero with ``positive=False``."""
        value = self.take(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            bound = "positive" if positive else "non-negative"
            raise self.error(name, f"must be a {bound} number, got {shown(value)}")
        return float(value)

    def end(self) -> None:
        """Refuse what was not asked for: a misspelt optional field must not be ignored."""
        for name in self._values:
            raise self.error(name, f"is unknown, known: {', '.join(self._known)}")


def shown(value: Any, length: int = 60) -> str:
    """``value`` as an error shows it: of something deep or long only the beginning, whatever it is."""
    return shortened(_BEGINNING.repr(value), length)


_BEGINNING = reprlib.Repr()
_BEGINNING.maxlevel, _BEGINNING.maxstring, _BEGINNING.maxlong, _BEGINNING.maxother = 4, 200, 200, 200
