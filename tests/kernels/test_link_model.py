"""What the compiled code promises of the link, by the model in ``tools/link_model.py``."""

from __future__ import annotations

import copy
import json

import pytest

from gfdit.comm.choice import Path as Way
from tools.link_model import (
    BEGIN,
    DEVICES,
    END,
    H100,
    PAGE,
    RECORD,
    SHAPES,
    Model,
    bulk_situations,
    heads_situation,
    small_situations,
    tables,
)
from tools.sass import CopyLoop, copy_loops_of

ENOUGH = 0.8
SMALL_US = 5.0


@pytest.fixture(scope="module")
def h100() -> Model:
    return Model(H100)


def test_heads_of_qwen_image_keep_the_link_busy(h100: Model) -> None:
    expected = h100.expect(heads_situation(SHAPES[0], 4, 3))
    assert expected.choice.path is Way.DIRECT_PUSH
    assert expected.share_of(H100.link_rate) >= ENOUGH


def test_large_paths_keep_the_link_busy(h100: Model) -> None:
    for name, situation, choice in bulk_situations():
        assert h100.expect(situation, choice).share_of(H100.link_rate) >= ENOUGH, name


def test_small_ones_take_a_few_microseconds() -> None:
    for device in DEVICES:
        for name, situation in small_situations():
            assert Model(device).expect(situation).us <= SMALL_US, (device.name, name)


def test_slower_code_would_be_seen() -> None:
    """As heads once were: 8 KiB a turn; and a loop of ten times as many instructions."""
    record = json.loads(RECORD.read_text())
    for column, factor in ((3, 1 / 4), (4, 10)):
        slower = copy.deepcopy(record)
        for name, rows in slower["variants"].items():
            if name.startswith("ulysses_exchange("):
                for figures in rows.values():
                    figures[column] = int(figures[column] * factor)
        assert Model(H100, slower).expect(heads_situation(SHAPES[0], 4, 3)).share_of(H100.link_rate) < ENOUGH


def test_the_page_has_these_tables() -> None:
    assert f"{BEGIN}\n{tables()}\n{END}" in PAGE.read_text(), "run python tools/link_model.py"


def test_copy_loops_are_found_in_machine_code() -> None:
    text = """
        /*0000*/                   LDG.E.64 R6, desc[UR16][R2.64] ;
.L_x_1:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR16][R2.64] ;
        /*0030*/                   IADD3 R2, R2, 0x10, RZ ;
        /*0040*/              @!P0 STG.E.128 desc[UR16][R8.64], R4 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   STG.E.64.STRONG.SYS desc[UR16][R8.64], R4 ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
"""
    assert copy_loops_of(text) == [CopyLoop(4, 16, 16)]
    with pytest.raises(ValueError, match="no code"):
        copy_loops_of("nothing")
