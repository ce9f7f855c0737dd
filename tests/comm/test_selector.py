"""The selector: what was measured decides, by interpolation; rules where nothing was; the same for all members."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

import pytest

from gfdit.comm.choice import Choice, Path, Site, Situation
from gfdit.comm.heap import Operation
from gfdit.comm.layout import MAX_CHUNKS, MAX_PROGRAMS, SegmentLayout
from gfdit.comm.selector import NUM_PROGRAMS, Selector, interpolate
from gfdit.comm.selector_table import SelectorTable, TableEntry

LAYOUT = SegmentLayout(8, 2, slot_bytes=1 << 20)
GPU = Site(LAYOUT, "some GPU", 90, has_multicast=False)
INTERPRETER = Site(SegmentLayout(4, 2, slot_bytes=1024), "the interpreter", 0, has_multicast=False)
POSSIBLE = {Path.PUSH: lambda situation, site: None}
FEW, MANY = Choice(Path.PUSH, 16384, 1), Choice(Path.PUSH, 65536, 32)


def entry(choice: Choice, num_bytes: int, us: float, operation=Operation.ALL_TO_ALL, ranks: int = 4) -> TableEntry:
    return TableEntry(operation, ranks, num_bytes, choice, us * 1e-6)


# One program is faster for small messages, many are for large ones; they cross between 4 KiB and 1 MiB.
CROSSING = SelectorTable(
    "some GPU",
    "made up",
    (entry(FEW, 4096, 5), entry(FEW, 1 << 20, 80), entry(MANY, 4096, 10), entry(MANY, 1 << 20, 20)),
)


def choose(num_bytes: int | None, ranks: int = 4, operation=Operation.ALL_TO_ALL, table=CROSSING) -> Choice:
    return Selector(GPU, POSSIBLE, table).choose(Situation(operation, ranks, num_bytes))


def test_the_fastest_measured_candidate_is_taken() -> None:
    assert [choose(size) for size in (4096, 1 << 20)] == [FEW, MANY]
    # In logarithms: 5 * 16**t = 10 * 2**t at t = 1/3, which is 4096 * 256**(1/3) bytes.
    crossing = 4096 * 256 ** (1 / 3)
    assert [choose(int(crossing * factor)) for factor in (0.98, 1.02)] == [FEW, MANY]


def test_beyond_the_sizes_measured_the_nearest_decides() -> None:
    assert [choose(size) for size in (0, 1, 1 << 30)] == [FEW, FEW, MANY]


def test_the_nearest_group_size_decides() -> None:
    table = SelectorTable("", "", (entry(FEW, 4096, 1, ranks=2), entry(MANY, 4096, 1, ranks=8)))
    assert [choose(4096, ranks, table=table) for ranks in (2, 3, 4, 8, 16)] == [FEW, FEW, MANY, MANY, MANY]


def test_a_candidate_counts_only_where_it_was_measured() -> None:
    table = SelectorTable("", "", (entry(FEW, 1024, 1), entry(MANY, 1024, 5), entry(MANY, 1 << 20, 50)))
    assert [choose(size, table=table) for size in (1024, 1025)] == [FEW, MANY]


def test_interpolation_is_linear_in_logarithms() -> None:
    measured = {1024: 2e-6, 16384: 32e-6}
    assert interpolate(measured, 4096) == pytest.approx(8e-6)
    assert interpolate({0: 1e-6, 256: 4e-6}, 16) == pytest.approx(2e-6)
    assert interpolate({0: 1e-6, 256: 4e-6}, 0) == 1e-6


def test_what_is_not_possible_is_not_chosen_and_the_reason_is_told() -> None:
    def obstacle(situation: Situation, site: Site) -> str | None:
        return "too large" if situation.num_bytes and situation.num_bytes > 5000 else None

    selector = Selector(GPU, {Path.PUSH: obstacle}, CROSSING)
    situation = Situation(Operation.ALL_TO_ALL, 4, 8192)
    assert selector.choose(situation) == Selector(GPU, POSSIBLE).choose(situation)
    assert "push is not possible: too large" in selector.explain(situation)
    assert "by rule" in selector.explain(situation)


def test_uneven_parts_and_unmeasured_operations_go_by_rule() -> None:
    selector = Selector(GPU, POSSIBLE, CROSSING)
    uneven = Situation(Operation.ALL_TO_ALL, 4, None)
    assert selector.choose(uneven) == Selector(GPU, POSSIBLE).choose(uneven)
    assert "uneven parts" in selector.explain(uneven)
    assert choose(4096, operation=Operation.ALL_GATHER) == choose(4096, operation=Operation.ALL_GATHER, table=None)


@pytest.mark.parametrize("site", [GPU, INTERPRETER])
def test_rules_fit_the_heap_and_what_is_compiled(site: Site) -> None:
    selector = Selector(site, POSSIBLE)
    for num_bytes in (None, 0, 1, 5000, 1 << 16, 1 << 20, (1 << 26) + 3):
        for ranks in (2, 8):
            choice = selector.choose(Situation(Operation.ALL_GATHER, ranks, num_bytes))
            assert choice.chunk_bytes % 16 == 0
            assert choice.chunk_bytes * MAX_CHUNKS >= site.layout.slot_bytes
            assert choice.num_programs in (*NUM_PROGRAMS, MAX_PROGRAMS)


def test_candidates_are_possible_and_fit_the_heap() -> None:
    obstacles = {**POSSIBLE, Path.DIRECT_PULL: lambda situation, site: "no"}
    found = Selector(GPU, obstacles).candidates(Situation(Operation.ALL_TO_ALL, 4, 100_000))
    assert {choice.path for choice in found} == {Path.PUSH} and len(set(found)) == len(found) > 3
    assert all(choice.chunk_bytes * MAX_CHUNKS >= LAYOUT.slot_bytes for choice in found)
    # A one-way operation has fewer paths.
    obstacles[Path.DIRECT_PULL] = lambda situation, site: None
    assert len(Selector(GPU, obstacles).candidates(Situation(Operation.ALL_TO_ALL, 4, 100_000))) > len(found)
    assert len(Selector(GPU, obstacles).candidates(Situation(Operation.SEND, 2, 100_000))) == len(found)


def test_a_forced_choice_holds_until_the_end() -> None:
    selector, situation = Selector(GPU, POSSIBLE, CROSSING), Situation(Operation.ALL_TO_ALL, 4, 4096)
    odd = Choice(Path.PUSH, 16384, 5)
    with selector.forced(odd):
        assert selector.choose(situation) == odd
        with selector.forced(None):
            assert selector.choose(situation) == odd
    assert selector.choose(situation) == FEW


def test_explain_says_what_was_measured() -> None:
    text = Selector(GPU, POSSIBLE, CROSSING).explain(Situation(Operation.ALL_TO_ALL, 4, 1 << 20))
    assert text.startswith(
        "all_to_all of 4 ranks, 1048576 bytes per peer: push (chunks of 65536 bytes, 32 programs)"
    )
    assert "20.0 us by the table of some GPU" in text and "80.0 us" in text and "\n" not in text


def test_chunks_that_do_not_suit_the_slots_are_refused() -> None:
    table = SelectorTable("", "", (entry(Choice(Path.PUSH, 1024, 1), 4096, 1),))
    with pytest.raises(ValueError, match="chunks of 1024 bytes do not suit slots of 1048576"):
        Selector(GPU, POSSIBLE, table)


def test_a_table_comes_back_from_its_file(tmp_path: FilePath) -> None:
    path = tmp_path / "table.json"
    CROSSING.save(path)
    assert SelectorTable.load(path) == CROSSING


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operation": "gossip"}, r"entries\[0\]: unknown operation 'gossip'; known: barrier, "),
        ({"path": "teleport"}, r"entries\[0\]: unknown path 'teleport'; known: .*push"),
        ({"seconds": 0}, "seconds must be positive"),
        ({"ranks": 0}, "ranks must be an integer of at least 1, got 0"),
        ({"bytes": None}, r"entries\[0\]"),
    ],
)
def test_a_wrong_table_is_one_clear_line(tmp_path: FilePath, change, message: str) -> None:
    path = tmp_path / "table.json"
    CROSSING.save(path)
    content = json.loads(path.read_text())
    content["entries"][0].update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        SelectorTable.load(path)


def test_another_version_or_no_json(tmp_path: FilePath) -> None:
    path = tmp_path / "table.json"
    for text in ("{", '{"version": 2, "entries": []}', "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"table\.json"):
            SelectorTable.load(path)
    with pytest.raises(ValueError, match=r"entries\[0\]: field 'operation' is missing"):
        path.write_text('{"version": 1, "entries": [{}]}')
        SelectorTable.load(path)
