"""The documentation: its links lead somewhere, its commands are understood, and the newcomer's path runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gfdit.cli.main import main
from tests.support.pages import PAGES, ROOT, anchors, commands, inline, is_synopsis, misunderstood
from tests.support.thorough import thorough

README = ROOT / "README.md"
DOCS = ROOT / "docs"
NEED_A_SERVER = {"profile", "serve", "bench", "top", "tiny-model", "admin"}
NEED_A_RECORDING = ("workload", "from-recording")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        found = page.parent / target if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("page", [page for page in PAGES if "gfdit " in page.read_text()], ids=_name)
def test_commands_are_understood(page: Path) -> None:
    """Whole ones by their own parser; of synopses, and of what running text quotes, the names."""
    found = [(words, not is_synopsis(words)) for words in commands(page)]
    found += [(words, False) for words in inline(page)]
    assert [(words, why) for words, whole in found if (why := misunderstood(words, whole=whole))] == []


def test_what_is_wrong_in_a_command_is_noticed() -> None:
    """Negative control."""
    wrong = ["gfdit", "sim", "--trace", "t", "--costs", "c", "--ranks", "4", "--policy", "edf", "--jiter", "1"]
    assert "--jiter" in misunderstood(wrong, whole=True)
    assert "--jiter" in misunderstood(wrong, whole=False)
    assert "no command" in misunderstood(["gfdit", "simulate"], whole=True)
    assert "--jitter" in misunderstood(["gfdit", "bench", "serve", "--jitter"], whole=False)
    assert misunderstood(["gfdit", "serve", "MODEL", "[--ranks", "N]", "--", "--dtype"], whole=False) == ""


def test_programs_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        made = [
            word for line in re.findall(r"(?:^|`)make ([a-z -]+)", text, re.MULTILINE) for word in line.split(" ")
        ]
        assert not made or made[0] in targets, (page, made)
        for module in re.findall(r"(?:^|`)(?:\.venv/bin/)?python -m ([a-z_.]+)", text, re.MULTILINE):
            path = ROOT / module.replace(".", "/")
            known = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert known or module in ("pytest", "build", "venv"), (page, module)


def test_the_readme_is_one_screen_that_begins_with_the_picture() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 66
    assert lines[2].startswith("![")
    assert "make demo " in README.read_text() and "make test " in README.read_text()


def test_every_page_is_on_the_path() -> None:
    """By links that begin at the README."""
    found, left = {README}, [README]
    while left:
        page = left.pop()
        linked = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())}
        left += sorted(linked - found)
        found |= linked
    assert sorted(page for page in PAGES if page not in found) == []


def test_what_to_do_is_said_of_every_alert() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "gfdit.rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    table = (DOCS / "operate.md").read_text().partition("## When an alert fires")[2].partition("\n## ")[0]
    assert alerts and re.findall(r"^\| `(Gfdit\w+)` \|", table, re.MULTILINE) == alerts


@pytest.mark.parametrize("page", [README, *thorough([DOCS / "choose_a_policy.md"])], ids=_name)
def test_what_needs_no_server_runs_as_it_is_typed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    typed = [
        words
        for words in commands(page)
        if words[1] not in NEED_A_SERVER and tuple(words[1:3]) != NEED_A_RECORDING
    ]
    assert len(typed) >= 2
    for words in typed:
        assert main(words[1:]) == 0, words
    if "On 2026" in page.read_text():  # its table has this form; figures may change with policies
        header = next(line for line in page.read_text().splitlines() if line.startswith("policy  "))
        assert header in capsys.readouterr().out.splitlines()
