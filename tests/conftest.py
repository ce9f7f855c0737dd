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
# all of such a folder, and begins with it. Elsewhere the tests of a file stay together, the long ones first.
SHARING_FOLDERS = ("tests/elastic", "tests/adapters")
LONG_FILES = ("tests/whole/test_whole.py", "tests/runtime/test_runtime.py")

# On a busy machine an example may take any time.
settings.register_profile("no bets on speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no bets on speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=16, help="requests of the soak test")
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the soak test")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel variant, not a selection")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (*SHARING_FOLDERS, *LONG_FILES)
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
    return folder if folder in SHARING_FOLDERS else file
