"""Linear and mixed-integer programmes, built term by term and solved by HiGHS (through scipy)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Solution:
    """``value`` of the best solution found, None without one; no solution is above ``bound``."""

    value: float | None
    bound: float
    is_optimal: bool


class Programme:
    """Maximize the gains of non-negative variables under rows of bounded sums."""

    def __init__(self) -> None:
        self._gain: list[float] = []
        self._largest: list[float] = []
        self._is_integer: list[bool] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []

    def add_variable(self, *, gain: float = 0.0, largest: float = math.inf, integer: bool = False) -> int:
        self._gain.append(gain)
        self._largest.append(largest)
        self._is_integer.append(integer)
        return len(self._gain) - 1

    def add_row(
        self, terms: Iterable[tuple[int, float]] = (), *, least: float = -math.inf, most: float = math.inf
    ) -> int:
        """``least`` <= the sum of the terms, (variable, factor), <= ``most``."""
        self._least.append(least)
        self._most.append(most)
        row = len(self._most) - 1
        for variable, factor in terms:
            self.add_term(row, variable, factor)
        return row

    def add_term(self, row: int, variable: int, factor: float) -> None:
        self._row.append(row)
        self._column.append(variable)
        self._value.append(factor)

    def relaxed(self) -> float:
        """The optimum if every variable may be fractional."""
        solved = self._milp([False] * len(self._gain), {})
        assert solved.status == 0, solved.message
        return -float(solved.fun)

    def solve(self, time_limit_s: float) -> Solution:
        """The optimum, or what is known of it when the time is over."""
        solved = self._milp(self._is_integer, {"time_limit": time_limit_s, "mip_rel_gap": 0.0})
        assert solved.status in (0, 1), solved.message  # optimal, time is over
        value = None if solved.x is None else -float(solved.fun)
        bound = math.inf if solved.mip_dual_bound is None else -float(solved.mip_dual_bound)
        return Solution(value, bound, solved.status == 0)

    def _milp(self, integrality: list[bool], options: dict[str, Any]) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
        from scipy.sparse import coo_array  # type: ignore[import-untyped]

        shape = (len(self._most), len(self._gain))
        rows = coo_array((self._value, (self._row, self._column)), shape=shape).tocsr()
        return milp(
            [-gain for gain in self._gain],
            constraints=LinearConstraint(rows, self._least, self._most),
            bounds=Bounds([0.0] * len(self._gain), self._largest),
            integrality=[int(flag) for flag in integrality],
            options=options,
        )
