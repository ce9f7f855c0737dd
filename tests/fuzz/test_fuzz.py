"""A slice of `make fuzz`: the corpus, in which what was found is kept, and some inputs of each target.

`make fuzz` runs a million. What it finds is mended and its input becomes a file of the corpus, named after what
was wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.mutation import mutated_bytes
from tests.fuzz.running import in_process, try_inputs
from tests.fuzz.targets import CORPUS, Target, every_target

NUM_INPUTS = 60
TARGETS = {target.name: target for target in every_target()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of decoders of images
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_does_harm(name: str) -> None:
    target = TARGETS[name]
    tally = try_inputs(target, len(target.seeds) + NUM_INPUTS, first_seed=0)
    assert not tally.failures, [wrong for wrong, _ in tally.failures.values()]
    assert tally.num_inputs >= len(target.seeds) + NUM_INPUTS
    assert tally.num_accepted and (tally.num_rejected or not target.raises), "it is all one, whatever the input"


def test_every_corpus_is_of_a_target() -> None:
    folders = {target.folder or target.name for target in TARGETS.values()}
    assert folders == {path.name for path in CORPUS.iterdir()}


# Would it be noticed?


def _planted(wrong: object) -> Target:
    def run(data: bytes) -> None:
        if len(data) % 7 == 3:
            match wrong:
                case Exception():
                    raise wrong
                case "loop":
                    while True:
                        pass
                case "crash":
                    import ctypes

                    ctypes.string_at(0)
                case "memory":
                    bytearray(2 << 30)

    return Target("planted", run, mutated_bytes, names=("t.jsonl",), folder="trace files")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tests.fuzz.limits.CPU_S", 0.2)
    yield


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (KeyError("x"), "KeyError"),
        (ValueError("t.jsonl: wrong\nand more"), "not one line"),
        (ValueError("something is wrong"), "names nothing"),
        (ValueError("t.jsonl: \ud800"), "cannot be printed"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "t.jsonl"), "no ValueError of ours"),
        ("loop", "has not ended"),
        ("memory", "MemoryError"),
        ("crash", "the process ended with status"),
    ],
)
def test_a_defect_is_noticed(wrong: object, told: str) -> None:
    tally = in_process(_planted(wrong), 60, first_seed=0)
    assert any(told in found for found, _ in tally.failures.values()), tally.failures


def test_json_too_deep_for_the_way_to_the_engine_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one ended a server: whatever the front lets through is copied as vLLM-Omni copies it."""
    target = TARGETS["HTTP requests"]
    deep = (target.corpus / "found-deep-edit").read_bytes()
    assert target.try_one(deep) == (False, "")
    monkeypatch.setattr("gfdit.omni.http_inputs.check_plain", lambda value, name: None)
    assert "HTTP 500" in target.try_one(deep)[1]


def test_the_same_seed_makes_the_same_inputs() -> None:
    made: list[list[bytes]] = [[], []]
    for inputs in made:
        try_inputs(TARGETS["trace files"], 120, first_seed=5, on_input=inputs.append)
    assert made[0] == made[1]
    assert len(set(made[0])) > 60
