"""What a running server answers under ``/v1/gfdit/``, asked from another process."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

TIMEOUT_S = 10.0


class NoAnswerError(ValueError):
    """Nobody there, or not in time: a server that starts, ends or hangs."""


def check_url(url: str) -> None:
    """Raises ``ValueError`` for what is no address of a server."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r}")


def ask_server(url: str, route: str, api_key: str | None, timeout_s: float = TIMEOUT_S) -> Mapping[str, Any]:
    """The answer of ``/v1/gfdit/{route}``. Raises ``ValueError`` that says in a line why there is none."""
    check_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/gfdit/{route}", headers=headers)
    # No proxy from the environment: servers are asked from beside them.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{url} asks for a key: --api-key") from None
        if error.code == HTTPStatus.NOT_FOUND:
            raise ValueError(f"{url} is no server of gfdit: it has no /v1/gfdit/{route}") from None
        raise ValueError(f"{url} answers HTTP {error.code}") from None
    except OSError as error:
        raise NoAnswerError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    except ValueError as error:
        raise ValueError(f"{url} does not answer: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{url} is no server of gfdit: its /v1/gfdit/{route} is something else")
    return found
