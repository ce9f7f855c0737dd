"""`gfdit agent`: tells HAProxy how much of the traffic a server should get, by what it has left to do.

HAProxy's agent-check opens a connection every ``agent-inter`` and reads a line. What it reads is asked of the
server at that moment:

- ``ready up 37%``: the server's weight, by :func:`gfdit.core.routing.weight_percent`;
- ``drain``: the server is not ready; requests that it has go on, no new ones are sent there;
- ``ready up 1%``: it does not say in time. Whether it hangs or is only busy is for HAProxy's own check to tell;
- ``down``: there is no server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

from gfdit.cli.server_routes import NoAnswerError, NotInTimeError, ask_server, check_url
from gfdit.core.routing import LEAST_PERCENT, ReplicaLoad, weight_percent

TIMEOUT_S = 2.0  # of the server: a router waits for the line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9777, help="where the router asks (default: %(default)s)")
    parser.add_argument("--api-key", help="the key that the server was started with")


def run(args: argparse.Namespace) -> int:
    check_url(args.url)
    with suppress(NoAnswerError):  # it may come yet; a wrong key or another program's port will not get better
        ask_server(args.url, "load", args.api_key, TIMEOUT_S)
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    told = ""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal told
        said = await asyncio.to_thread(say, args.url, args.api_key)
        if (state := said.rstrip("0123456789%")) != told:
            told = state
            print(f"gfdit agent: {args.url}: {said}", file=sys.stderr, flush=True)
        with suppress(ConnectionError):  # it did not wait
            writer.write(f"{said}\n".encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, args.host, args.port)
    async with server:
        await server.serve_forever()


def say(url: str, api_key: str | None) -> str:
    """The line for HAProxy. There is one whatever is wrong with the server, or its last weight would stay."""
    try:
        load = ReplicaLoad.of_json(ask_server(url, "load", api_key, TIMEOUT_S))
    except NotInTimeError:
        return f"ready up {LEAST_PERCENT}%"
    except ValueError as error:
        return f"down #{' '.join(str(error).split())}"
    if not load.ready:
        return "drain"
    return f"ready up {weight_percent(load)}%"
