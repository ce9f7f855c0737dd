"""Options of the test run, and which tests share a process of it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Folders whose tests share servers that are slow to start: with pytest-xdist's `--dist loadscope` one process runs
# all of such a folder. Elsewhere, and where a file of them starts a server of its own, the tests of a file stay
# together. The long ones begin.
SHARING_FOLDERS = ("tests/elastic", "tests/adapters")
OWN_SERVERS = (
    "tests/elastic/test_profile.py",
    "tests/elastic/test_http.py",
    "tests/elastic/test_cached_traffic.py",
    "tests/elastic/test_parallel_decode.py",
    "tests/elastic/test_engine_death.py",
)
LONG_FILES = (
    "tests/kernels/test_gpu_check.py",
    "tests/runtime/test_runtime.py",
    "tests/adapters/components/test_served.py",
    "tests/whole/test_whole.py",
)

# On a busy machine an example may take any time.
settings.register_profile("no bets on speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no bets on speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=16, help="requests of the soak test")
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the soak test")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel variant, not a selection")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (*SHARING_FOLDERS, *OWN_SERVERS, *LONG_FILES)
    order = {scope: index for index, scope in enumerate(first)}
    items.sort(key=lambda item: order.get(_scope(item.nodeid), len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByScope(config, log)


def _scope(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    folder = str(PurePosixPath(file).parent)
    return folder if folder in SHARING_FOLDERS and file not in OWN_SERVERS else file
