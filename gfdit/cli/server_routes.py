"""What a running server answers under ``/v1/gfdit/``, asked from another process."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 600.0  # of what the control process has to answer, or another one in its place


class NoAnswerError(ValueError):
    """Nobody there: a server that starts, or has ended."""


class NotInTimeError(NoAnswerError):
    """Somebody is there, and says nothing: a server that hangs, or is busy."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="the key that the server was started with")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="a file with the key, so that no list of processes has it"
    )


def key_of(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return args.api_key
    if args.api_key is not None:
        raise ValueError("--api-key and --api-key-file are two ways to give one key")
    return Path(args.api_key_file).read_text().strip()


def check_url(url: str) -> None:
    """Raises ``ValueError`` for what is no address of a server."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r}")


def ask_server(
    url: str,
    route: str,
    api_key: str | None,
    timeout_s: float = TIMEOUT_S,
    *,
    body: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The answer of ``/v1/gfdit/{route}``, of a POST if there is a ``body``.

    Raises ``ValueError`` that says in a line why there is none.
    """
    check_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/gfdit/{route}", data, headers)
    # No proxy from the environment: servers are asked from beside them.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{url} asks for a key: --api-key or --api-key-file") from None
        if error.code == HTTPStatus.NOT_FOUND:
            raise ValueError(f"{url} is no server of gfdit: it has no /v1/gfdit/{route}") from None
        raise ValueError(_line_of(error) or f"{url} answers HTTP {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        kind = NotInTimeError if isinstance(reason, TimeoutError) else NoAnswerError
        raise kind(f"{url} does not answer: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url} does not answer: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{url} is no server of gfdit: its /v1/gfdit/{route} is something else")
    return found


def _line_of(error: urllib.error.HTTPError) -> str:
    """What the server says of it, if that is a line of its own."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = json.load(error)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    return ""
