"""The table of what is fuzzed: wherever something from outside enters, and what may come of it.

A target is called with an input and either returns, or raises what its documentation says, in one line that names
the thing. Whatever else happens is a defect: another exception, a second line, a line that cannot be printed, a
hang, memory without bounds, or (an ``AssertionError`` of the target itself) something that was accepted and is of
no use.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.mutation import MAX_BYTES, Mutator

CORPUS = Path(__file__).with_name("corpus")
MAX_MESSAGE = 3000  # characters, besides what it repeats of the input


@dataclass(frozen=True)
class Target:
    """``run`` is called with what ``mutate`` makes of the corpus ``folder``, and with what ``strategy`` makes.

    ``raises`` are the exceptions that it may raise, exactly these and no subclasses: ``json.JSONDecodeError`` is
    a ``ValueError``, and says nothing of where. Each message must have one of ``names`` in it. Of a million inputs
    a target gets a share in proportion to ``weight``.
    """

    name: str
    run: Callable[[bytes], object]
    mutate: Mutator
    strategy: Callable[[], st.SearchStrategy[bytes]] | None = None
    names: tuple[str, ...] = ()
    raises: tuple[type[Exception], ...] = (ValueError,)
    weight: float = 1.0
    folder: str = ""  # of the corpus, unless the target's name

    @property
    def corpus(self) -> Path:
        return CORPUS / (self.folder or self.name)

    @cached_property
    def seeds(self) -> tuple[bytes, ...]:
        found = sorted(path for path in self.corpus.iterdir() if path.is_file())
        assert found, f"{self.corpus} is empty"
        return tuple(path.read_bytes() for path in found)

    def try_one(self, data: bytes) -> tuple[bool, str]:
        """Whether ``data`` was accepted, and what is wrong; empty if nothing is."""
        try:
            self.run(data)
        except self.raises as error:
            return False, self._wrong_with(error)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"[:300] + _place(error)
        return True, ""

    def _wrong_with(self, error: Exception) -> str:
        message = str(error)
        where = _place(error)
        if type(error) not in self.raises:
            return f"{type(error).__name__} is no {self.raises[0].__name__} of ours: {message}"[:300] + where
        if not message.strip() or "\n" in message or "\r" in message:
            return f"not one line: {message!r}"[:300] + where
        if len(message) > MAX_MESSAGE + 6 * MAX_BYTES:
            return f"a message of {len(message)} characters: {message!r}"[:300] + where
        try:
            message.encode()
        except UnicodeEncodeError:
            return f"cannot be printed: {message!r}"[:300] + where
        if self.names and not any(name in message for name in self.names):
            return f"names nothing of {', '.join(self.names)}: {message}"[:300] + where
        return ""


def _place(error: BaseException) -> str:
    """Of the last line of ours that was running."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/tests/fuzz/" not in file and "/python3" not in file:
            found = f" [{Path(file).name}:{trace.tb_lineno}]"
        trace = trace.tb_next
    return found


def scratch_file(name: str) -> Path:
    """In memory, of this process alone; it ends with it."""
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="gfdit-fuzz-", dir="/dev/shm"))
    return Path(_folders[0].name) / name


_folders: list[tempfile.TemporaryDirectory[str]] = []


def of_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """``read`` of a file with the input in it."""

    def run(data: bytes) -> object:
        path = scratch_file(name)
        path.write_bytes(data)
        return read(path)

    return run


def every_target() -> tuple[Target, ...]:
    """All of them; those of the server's side need vLLM-Omni, which takes a while to import."""
    from tests.fuzz import of_answers, of_files, of_http, of_messages, of_requests, of_words

    modules = (of_messages, of_requests, of_files, of_words, of_answers, of_http)
    return tuple(target for module in modules for target in module.TARGETS)
