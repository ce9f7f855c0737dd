"""`gfdit top`: a live view of a running server in a terminal. It only reads."""

import argparse
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gfdit.cli.server_routes import add_server_options, ask_server, key_of
from gfdit.core.json_fields import one_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
LANE_LENGTH = 60  # looks
MAX_REQUESTS = 30

State = Mapping[str, Any]
"""The answer of ``/v1/gfdit/state``; ``docs/metrics.md`` has the fields."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument("--interval-s", type=float, default=1.0, help="between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="one look, then end; for scripts")


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval_s <= 3600:
        raise ValueError(f"--interval-s must be from 0.1 to 3600, got {args.interval_s:g}")
    from rich.console import Console
    from rich.live import Live

    view, key = View(args.url), key_of(args)
    console = Console()
    if args.once:
        view.take(fetch_state(args.url, key))
        console.print(view.render())
        return 0
    view.take(fetch_state(args.url, key))  # a wrong address or key ends it at once
    with Live(view.render(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            try:
                view.take(fetch_state(args.url, key))
            except ValueError as error:
                view.trouble = str(error)  # it may come back
            live.update(view.render(), refresh=True)


def fetch_state(url: str, api_key: str | None) -> State:
    """Raises ``ValueError`` that says in a line why there is none."""
    return checked_state(ask_server(url, "state", api_key), url)


def checked_state(state: Any, url: str) -> State:
    """Raises ``ValueError`` for an answer that cannot be shown, as of another program or another version."""
    try:
        view = View(url)
        view.take(state)
        view.render()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{url} is no server of gfdit: its /v1/gfdit/state is something else ({why})") from error
    return state


class View:
    """What was seen lately, and how it looks."""

    def __init__(self, url: str) -> None:
        self.trouble = ""
        self._url = url
        self._state: State = {}
        self._lanes: dict[int, deque[str]] = {}
        self._colours: dict[str, str] = {}  # of the requests that are alive
        self._num_seen = 0

    def take(self, state: State) -> None:
        self._state, self.trouble = state, ""
        alive = {request["id"]: request for request in state["requests"]}
        self._colours = {
            name: colour for name, colour in self._colours.items() if name in alive or self._drawn(name)
        }
        running: dict[int, str] = {}
        for name, request in alive.items():
            if name not in self._colours:
                self._colours[name] = COLOURS[self._num_seen % len(COLOURS)]
                self._num_seen += 1
            running |= dict.fromkeys(request["ranks"], name)
        for rank in state["rank_states"]:
            lane = self._lanes.setdefault(rank["rank"], deque(maxlen=LANE_LENGTH))
            lane.append(running.get(rank["rank"], "" if rank["state"] == "up" else rank["state"]))

    def _drawn(self, name: str) -> bool:
        return any(name in lane for lane in self._lanes.values())

    def render(self) -> "Group":
        from rich.console import Group

        return Group(self._head(), self._ranks(), self._requests(), self._classes(), self._faults())

    def _head(self) -> "Text":
        from rich.text import Text

        state = self._state
        if self.trouble:
            return Text(self.trouble, style="bold red")
        word = "ready" if state["ready"] else f"not ready: {state['reason']}"
        text = Text.assemble((f"{self._url}  ", "bold"), (word, "green" if state["ready"] else "bold red"))
        text.append(f"  policy {state['policy'] or '?'}  ranks {state['live_ranks']} of {state['ranks']}")
        text.append(f"  requests {state['alive']} ({state['queued']} queued)")
        text.append(f"  left {state['backlog_rank_s']:.1f} rank-s  seen {state['age_s']:.1f} s ago")
        return text

    def _ranks(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("rank", "busy", "state", "lately, one request a colour", "holds", box=None, pad_edge=False)
        for rank in self._state["rank_states"]:
            lane = Text()
            for name in self._lanes[rank["rank"]]:
                colour = self._colours.get(name)
                lane.append(
                    "█" if colour else "·" if not name else "x", style=colour or ("dim" if not name else "red")
                )
            held = rank["artifact_bytes"] + rank["component_bytes"]
            style = "" if rank["state"] == "up" else "bold red"
            state = rank["state"] + (f", {rank['restarts']} restarts" if rank["restarts"] else "")
            table.add_row(
                str(rank["rank"]), f"{rank['busy_ratio']:.0%}", Text(state, style), lane, f"{held / 2**20:.0f} MiB"
            )
        return table

    def _requests(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("request", "class", "state", "ranks", "steps", "left s", "slack s", box=None, pad_edge=False)
        requests = self._state["requests"]
        for request in requests[:MAX_REQUESTS]:
            slack_s, left_s = request["slack_s"], request["left_s"]
            table.add_row(
                Text(request["id"][:36], self._colours.get(request["id"], "")),
                Text(request["slo_class"][:16]),
                Text(request["task"] or request["state"]),
                ",".join(map(str, request["ranks"])) or "-",
                f"{request['steps_done']}/{request['num_steps']}",
                "-" if left_s is None else f"{left_s:.1f}",
                Text("-") if slack_s is None else Text(f"{slack_s:+.1f}", "red" if slack_s < 0 else "green"),
            )
        if len(requests) > MAX_REQUESTS:
            table.add_row(f"and {len(requests) - MAX_REQUESTS} more")
        return table

    def _classes(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("class", "in time", "late", "share", "left rank-s", box=None, pad_edge=False)
        backlog = self._state["backlog_rank_s_by_class"]
        for name, numbers in self._state["deadlines"].items():
            met, missed = numbers["met"], numbers["missed"]
            share = f"{met / (met + missed):.1%}" if met + missed else "-"
            table.add_row(Text(name), str(met), str(missed), share, f"{backlog.get(name, 0.0):.1f}")
        return table

    def _faults(self) -> "Text":
        from rich.text import Text

        told = [f"{name.replace('_', ' ')} {count}" for name, count in self._state["faults"].items() if count]
        told += [f"rejected {self._state['rejected']}"] if self._state["rejected"] else []
        return Text(f"since the start: {', '.join(told)}" if told else "no faults", "yellow" if told else "dim")
