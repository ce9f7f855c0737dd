"""The command line: quick help, and one clear line for every mistake."""

import subprocess
import sys
import types
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from gfdit.cli import main as cli


def _error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == cli.USAGE_ERROR
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_help_lists_the_commands_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in cli.COMMANDS)


def test_no_command_is_a_mistake_with_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE_ERROR
    assert "tiny-model" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _error(capsys, "srve") == f"gfdit: error: unknown command 'srve'; allowed: {', '.join(cli.COMMANDS)}\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["no-such-family", "x"], "choose from anima"),
        (["qwen-image", "x", "--sed", "1"], "unrecognized: --sed 1; allowed: --help, --seed, --layers"),
        (["qwen-image", "x", "--seed", "one"], "--seed: invalid int value: 'one'"),
        (["qwen-image", "x", "--head-dim", "20"], "--head-dim must be a positive multiple of 16, got 20"),
        (["qwen-image", "x", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["qwen-image", "x", "--layers", "0"], "--layers must be at least 1, got 0"),
        (["qwen-image", "x", "--", "y"], "takes nothing after --"),
        (["qwen-image"], "the following arguments are required: DIR"),
    ],
)
def test_tiny_model_mistakes(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = _error(capsys, "tiny-model", *argv)
    assert error.startswith("gfdit tiny-model: error: ") and told in error.replace("'anima'", "anima")


def test_tiny_model_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert "not an empty folder" in _error(capsys, "tiny-model", "qwen-image", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_what_follows_the_dashes_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Namespace()

    def configure(parser: ArgumentParser) -> None:
        parser.add_argument("model")
        parser.add_argument("--ranks", type=int)

    def run(args: Namespace) -> int:
        seen.args = args
        return 3

    module = types.SimpleNamespace(configure=configure, run=run)
    monkeypatch.setitem(sys.modules, "planted_command", module)
    monkeypatch.setitem(cli.COMMANDS, "planted", cli.Command("planted_command", "", takes_passthrough=True))
    assert cli.main(["planted", "m", "--ranks", "2", "--", "--dtype", "float32", "--", "x"]) == 3
    assert seen.args.model == "m" and seen.args.ranks == 2
    assert seen.args.passthrough == ["--dtype", "float32", "--", "x"]


def test_installed_command_runs() -> None:
    done = subprocess.run([Path(sys.executable).with_name("gfdit"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "tiny-model" in done.stdout
