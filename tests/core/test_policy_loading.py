from __future__ import annotations

from pathlib import Path

import pytest

from gfdit.cli.main import main
from gfdit.core.policy.loading import known_policies, load_policy
from gfdit.policies.equipartition import Equipartition
from gfdit.policies.fcfs import Fcfs

GOOD = '''\
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal, Optional

@dataclass
class Mine:
    """Mine, in one line.

    And more.
    """
    size: int
    share: float = 0.5
    eager: bool = False
    label: str = "x"
    bound: int | None = None
    hint: Optional[str] = None
    order: Literal["old", "new", 3] = "old"
    name = "mine"

    def __post_init__(self):
        if self.size > 99:
            raise ValueError("size must be\\n   less than 100")
        self.ratio = 1 / self.size

    def schedule(self, view):
        return None

class Plain:
    def __init__(self, depth: int = 2):
        self.depth, self.name = depth, "plain"

    schedule = Mine.schedule

class Child(Plain):
    pass

class Nameless:
    def schedule(self, view):
        return None

class Lazy:
    name = "lazy"
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def error_of(spec: str, **args: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_policy(spec, args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_by_name_module_and_file(file: Path) -> None:
    assert load_policy("fcfs", {"group_size": "3"}) == Fcfs(3)
    assert load_policy("gfdit.policies.equipartition:Equipartition", {}) == Equipartition()
    assert load_policy(f"{file}:Mine", {"size": "1"}).name == "mine"
    assert vars(load_policy(f"{file}:Plain", {"depth": "5"})) == {"depth": 5, "name": "plain"}
    assert vars(load_policy(f"{file}:Child", {}))["depth"] == 2


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", " 7", 7),
        ("share", "1e-3", 0.001),
        ("eager", "TRUE", True),
        ("eager", "no", False),
        ("label", "12", "12"),
        ("bound", "4", 4),
        ("bound", "None", None),
        ("hint", "none", None),
        ("hint", "some", "some"),
        ("order", "new", "new"),
        ("order", "3", 3),
    ],
)
def test_arguments_are_typed_by_the_annotations(file: Path, name: str, text: str, value: object) -> None:
    policy = load_policy(f"{file}:Mine", {"size": "1"} | {name: text})
    assert getattr(policy, name) == value
    assert type(getattr(policy, name)) is type(value)


def test_wrong_names_and_arguments(file: Path) -> None:
    mine = f"{file}:Mine"
    assert error_of("x") == f"unknown policy 'x', known: {', '.join(known_policies())}"
    assert error_of("edf", groupsize="1") == "policy edf has no argument 'groupsize', it takes none"
    assert error_of("fcfs", groupsize="1") == (
        "policy fcfs has no argument 'groupsize', known: group_size (int), assign (request or task)"
    )
    assert error_of("fcfs", group_size="x") == "policy fcfs: argument group_size must be int, got 'x'"
    assert error_of("fcfs", group_size="0") == "policy fcfs: group_size must be at least 1, got 0"
    assert error_of(mine) == f"policy {mine} needs the argument size (int)"
    assert (
        error_of(mine, size="1", eager="perhaps") == f"policy {mine}: argument eager must be bool, got 'perhaps'"
    )
    assert error_of(mine, size="1", bound="x").endswith("argument bound must be int or none, got 'x'")
    assert error_of(mine, size="1", order="3.0").endswith("argument order must be old or new or 3, got '3.0'")
    assert error_of(mine, size="100") == f"policy {mine}: size must be less than 100"
    assert error_of(mine, size="0").endswith("ZeroDivisionError: division by zero")
    assert error_of(f"{file}:Lazy").endswith("mine.py, line 41: class Lazy has no method schedule(self, view)")
    assert error_of(f"{file}:Nameless").endswith("line 37: class Nameless has no attribute name: str")


def test_wrong_places(file: Path, tmp_path: Path) -> None:
    assert error_of(f"{tmp_path}/absent.py:X") == f"policy file {tmp_path}/absent.py does not exist"
    assert (
        error_of("no.such.module:X") == "policy module no.such.module: ModuleNotFoundError: No module named 'no'"
    )
    missing = error_of(f"{file}:Mein")
    assert missing.startswith(f"policy file {file} has no class 'Mein', it defines: Mine (line 5), Plain (line ")
    assert "needs a class, as in FILE.py:CLASS, it defines: Mine (line 5)" in error_of(str(file))
    assert error_of("gfdit.policies.fcfs:widest").startswith(
        "policy module gfdit.policies.fcfs has no class 'widest'"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nclass A(:\n    pass\n", ", line 2: invalid syntax"),
        ("import os\n\n\nraise RuntimeError('a\\nb')\n", ", line 4: RuntimeError: a b"),
        ("import no_such_thing\n", ", line 1: ModuleNotFoundError: No module named 'no_such_thing'"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert error_of(f"{path}:A") == f"policy file {path}{expected}"


def test_known_policies_have_a_summary() -> None:
    assert {"edf", "equipartition", "fcfs", "rssp", "srtf", "static", "tetriserve"} <= known_policies().keys()
    for text in known_policies().values():
        assert text.endswith(".") and "cannot be loaded" not in text


def test_the_command_lists_names_arguments_and_summaries(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    listed = capsys.readouterr().out
    for text in ("fcfs", "--policy-arg group_size=...  int, default 1", "max_sp=...  int or none, default none"):
        assert text in listed
    assert main(["policies", f"{file}:Mine"]) == 0
    listed = capsys.readouterr().out
    for text in ("Mine, in one line.", "size=...  int, required", "order=...  old or new or 3, default old"):
        assert text in listed
    assert main(["policies", "nope"]) == 2
    assert "unknown policy 'nope', known: " in capsys.readouterr().err
