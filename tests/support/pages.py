"""What the documentation says: its pages, links and commands."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

from gfdit.cli.main import COMMANDS, parser_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "results" / "README.md"])


def blocks(page: Path) -> list[str]:
    """Fenced code that is of no other language than the shell's."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in ("", "bash", "sh")]


def lines_of(block: str) -> Iterator[list[str]]:
    """The words of each command, of which each is on a line or goes on behind a backslash; comments left out."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith(("gfdit ", "$ gfdit ")):
            yield shlex.split(line.removeprefix("$ "), comments=True)


def commands(page: Path) -> list[list[str]]:
    return [words for block in blocks(page) for words in lines_of(block)]


def inline(page: Path) -> list[list[str]]:
    """`gfdit ...` in running text, which may be a part of a command; messages of gfdit begin so as well."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [quoted.split() for quoted in re.findall(r"`(gfdit [a-z][^`\n]*)`", text)]
    return [words for words in found if words[1] in COMMANDS]


def is_synopsis(words: list[str]) -> bool:
    return any("[" in word or "…" in word or word in ("...", "FAMILY") for word in words)


def misunderstood(words: list[str], *, whole: bool) -> str:
    """Why ``gfdit`` does not understand a command; empty if it does. Of a part, only its names are looked at."""
    name, *rest = words[1:]
    if name not in COMMANDS:
        return f"there is no command {name}"
    own = rest[: rest.index("--")] if "--" in rest else rest
    parser = parser_of(name)
    if whole:
        try:
            parser.parse_args(own)
        except ValueError as error:
            return str(error)
        return ""
    known = set(_options(parser, own))
    said = {option for word in own for option in re.findall(r"^\[?(--[a-z][a-z0-9-]*)", word)}
    return f"unknown: {', '.join(sorted(said - known))}" if said - known else ""


def _options(parser: ArgumentParser, words: list[str]) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, _SubParsersAction):
            for word in words:
                if word in action.choices:
                    yield from _options(action.choices[word], words)


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are made of them on the web."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
