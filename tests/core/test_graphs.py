"""What is no graph of a request."""

from __future__ import annotations

import pytest

from gfdit.core import Task, TaskGraph, TaskKind, trajectory
from gfdit.core.layouts import SINGLE


def task(name: str, reads: str = "", makes: str = "", deferred: str = "", component: str = "") -> Task:
    parts = (tuple(reads.split()), tuple(makes.split()), (SINGLE,), tuple(deferred.split()), component)
    return Task(name, "r", TaskKind.DENOISE, 0, *parts)


MADE = task("a", makes="x y")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((), "request r has no tasks"),
        ((MADE, MADE), "task a is repeated"),
        ((task("b", "x"), MADE), "task b reads x, which no earlier task makes"),
        ((MADE, task("b", deferred="z")), "task b reads z, which no earlier task makes"),
        ((MADE, task("b", makes="y")), "task b makes y a second time"),
        (
            (MADE, task("b", deferred="x"), task("c", "x")),
            "task c reads x, which another one reads while it is made",
        ),
        (
            (MADE, task("b", deferred="x"), task("c", deferred="x")),
            "task c reads x, which another one reads while it is made",
        ),
        (
            (MADE, task("b", "x"), task("c", deferred="x")),
            "task c reads x while it is made, and another one reads it, too",
        ),
        ((MADE, task("b", "x", component="vae")), "request r has tasks with and without a component"),
    ],
)
def test_what_is_no_graph_is_refused(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskGraph("r", tasks).check()


def test_graphs() -> None:
    trajectory("r", 3, (SINGLE,)).check()
    TaskGraph("r", (MADE, task("b", "x", deferred="y"), task("c", "x"))).check()
