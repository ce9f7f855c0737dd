"""The group knapsack of a scheduling round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(groups: Sequence[Sequence[tuple[int, float]]], capacity: int) -> list[int | None]:
    """Choose at most one option of each group, each a (width, value), of the greatest total value.

    Widths are in ranks and their sum is at most ``capacity``; of equally good choices one that needs the fewest
    ranks is taken. Returns the index of the chosen option by group, None for none. Dynamic programming over the
    ranks used, as Algorithm 1 of the TetriServe paper: O(options x capacity) time.
    """
    best = np.full(capacity + 1, -np.inf)  # greatest value by number of ranks used
    best[0] = 0.0
    choices = np.full((len(groups), capacity + 1), -1)
    for group, choice in zip(groups, choices, strict=True):
        following = best.copy()
        for index, (width, value) in enumerate(group):
            if width <= capacity:
                reached = best[: capacity + 1 - width] + value
                better = reached > following[width:]
                following[width:][better] = reached[better]
                choice[width:][better] = index
        best = following
    left = int(np.argmax(best))
    chosen: list[int | None] = []
    for group, choice in zip(reversed(groups), choices[::-1], strict=True):
        index = int(choice[left])
        chosen.append(index if index >= 0 else None)
        left -= group[index][0] if index >= 0 else 0
    return chosen[::-1]
