"""A slice of the soak over kernels; see ``tests.kernels.soak``."""

from __future__ import annotations

from tests.comm.soak import check_growth
from tests.comm.worlds import heap_files
from tests.kernels.soak import run


def test_random_collectives_by_random_paths() -> None:
    for rank, pieces in enumerate(run(4, 7, 16, 8, timeout_s=280)):
        assert len(pieces) == 2 and pieces[-1].num_performed > 4
        check_growth(rank, pieces)
    assert not heap_files()
