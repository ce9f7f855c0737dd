"""`gfdit admin`: change a running server, by its `/v1/gfdit/admin`. What cannot be changes nothing."""

import argparse
import json
import time
from typing import Any, get_args

from gfdit.cli.pairs import parse_pairs
from gfdit.cli.server_routes import CHANGE_TIMEOUT_S, add_server_options, ask_server, key_of
from gfdit.core.json_fields import parse_json
from gfdit.core.policy.admission import AdmissionMode

LOOK_INTERVAL_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)

    add("show", "print what is in force")
    policy = add("policy", "decide by another policy, or with other arguments; no request fails")
    policy.add_argument("policy", help="an installed name (see `gfdit policies`), or that of the server's start")
    policy.add_argument("--policy-arg", action="append", default=[], metavar="KEY=VALUE", help="repeat")
    admission = add("admission", "turn away what would be late, or nothing")
    admission.add_argument("admission", choices=get_args(AdmissionMode))
    costs = add("costs", "estimate times with another cost table; the policy begins anew")
    costs.add_argument("costs", metavar="FILE|none", help="a file of this machine; none: nominal times")
    limits = add("limits", "change limits of docs/serving.md, such as max_requests=64")
    limits.add_argument("limits", nargs="+", metavar="NAME=VALUE", help="none stands for no limit")
    for name, what in (("recording", "the recording"), ("timeline", "the timeline")):
        add(name, f"begin or end {what} that the server was started with").add_argument(
            name, choices=("on", "off")
        )
    for name, summary in (
        ("drain-rank", "give ranks nothing more; what they hold goes to others"),
        ("add-rank", "give ranks that were drained work again"),
    ):
        ranks = add(name, summary)
        ranks.add_argument("ranks", nargs="+", type=int, metavar="RANK")
    drain = add("drain", "take no new requests; what runs goes on, and the server stays")
    add("undrain", "take new requests again")
    for waits in (commands.choices["drain-rank"], drain):
        waits.add_argument("--wait", action="store_true", help="return once it is done")


def run(args: argparse.Namespace) -> int:
    key = key_of(args)
    if args.command == "show":
        state = ask_server(args.url, "admin", key)
    else:
        state = ask_server(args.url, "admin", key, CHANGE_TIMEOUT_S, body=change_of(args))
    if getattr(args, "wait", False):
        _wait(args, key)
    for name, value in state.items():
        print(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    return 0


def change_of(args: argparse.Namespace) -> dict[str, Any]:
    """The body of the call (:class:`gfdit.omni.admin.Change`)."""
    match args.command:
        case "policy":
            return {"policy": args.policy, "policy_args": parse_pairs("--policy-arg", args.policy_arg)}
        case "admission":
            return {"admission": args.admission}
        case "costs":
            return {"costs": None if args.costs == "none" else _read(args.costs)}
        case "limits":
            return {
                "limits": {name: _number(name, text) for name, text in parse_pairs("limits", args.limits).items()}
            }
        case "recording":
            return {"record": args.recording == "on"}
        case "timeline":
            return {"timeline": args.timeline == "on"}
        case "drain-rank":
            return {"drain_ranks": args.ranks}
        case "add-rank":
            return {"add_ranks": args.ranks}
        case command:
            return {"drain": command == "drain"}


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        return parse_json(file.read(), path)


def _number(name: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"limits takes NAME=NUMBER, or NAME=none for no limit, got {name}={text}") from None


def _wait(args: argparse.Namespace, key: str | None) -> None:
    """Until the ranks named hold nothing, or nothing is alive in the server."""
    while True:
        state = ask_server(args.url, "state", key)
        left = state["alive"]
        if args.command == "drain-rank":
            left = [one for one in state["rank_states"] if one["rank"] in args.ranks and one["state"] != "drained"]
        if not left:
            return
        time.sleep(LOOK_INTERVAL_S)
