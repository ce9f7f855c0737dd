"""Reading JSON that people write by hand: each field is checked and each error names place and field."""

from __future__ import annotations

import json
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


class JsonFields:
    """The fields of one JSON object; ``where`` names the object in every error (``file: entries[3]``)."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: must be an object, got {_show(value)}")
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
        if not isinstance(value, str) or not value:
            raise self.error(name, f"must be a non-empty string, got {_show(value)}")
        return value

    def text_or_none(self, name: str) -> str | None:
        """A non-empty string; None if it is null or left out."""
        return self.take(name, None) if self._values.get(name) is None else self.text(name)

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {_show(value)}")
        return value

    def integer(
        self, name: str, default: Any = _MISSING, *, minimum: int | None = 1, maximum: int = LARGEST_INTEGER
    ) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
            bound = "" if minimum is None else f" of at least {minimum}"
            raise self.error(name, f"must be an integer{bound}, got {_show(value)}")
        if abs(value) > maximum:
            raise self.error(name, f"must be an integer of at most {maximum}, got {_show(value)}")
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
            raise self.error(name, f"must be a {bound} number, got {_show(value)}")
        return float(value)

    def end(self) -> None:
        """Refuse what was not asked for: a misspelt optional field must not be ignored."""
        for name in self._values:
            raise self.error(name, f"is unknown, known: {', '.join(self._known)}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
