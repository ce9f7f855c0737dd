"""The page for operators of GPUs quotes messages that exist, links to what is there, and claims no run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
# Not gfdit's own.
_OTHERS = {"an illegal memory access"}


def _quoted() -> list[str]:
    """Of the first column of the table of messages."""
    table = PAGE.read_text().partition("## Messages")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [text for row in rows for text in re.findall("`([^`]+)`", row.split(" | ")[0])]


def _texts() -> str:
    """All that gfdit can say: its strings, with what varies left out."""
    found = []
    for path in (ROOT / "gfdit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
    return "\n".join(found)


@pytest.fixture(scope="module")
def texts() -> str:
    return _texts()


def test_messages_that_the_page_explains_exist(texts: str) -> None:
    quoted = _quoted()
    assert len(quoted) > 30
    assert [text for text in quoted if text not in _OTHERS and text not in texts] == []


def test_a_message_that_does_not_exist_is_noticed(texts: str) -> None:
    assert "is not started again after the server is" not in texts


def test_the_page_says_that_nothing_was_run() -> None:
    assert "None of this was ever run on a GPU" in PAGE.read_text()


def test_the_page_is_found_and_its_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "serving.md"):
        assert "gpu.md" in page.read_text(), page
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link
