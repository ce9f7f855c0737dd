"""Requests to a server on this machine: without proxies, and without TLS, whose certificates take long to read."""

from __future__ import annotations

from functools import partial

import httpx

from tests.support.waiting import HANG_S

get = partial(httpx.get, timeout=HANG_S, trust_env=False, verify=False)
post = partial(httpx.post, timeout=HANG_S, trust_env=False, verify=False)
delete = partial(httpx.delete, timeout=HANG_S, trust_env=False, verify=False)
