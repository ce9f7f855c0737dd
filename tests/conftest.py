"""Options of the test run, and which tests share a process of it."""

from __future__ import annotations

import gc
import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from gfdit.observe.logs import RateLimit
from gfdit.omni.plugin import find_accelerator

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# Folders whose tests share servers that are slow to start: with pytest-xdist's `--dist loadscope` one process runs
# all of such a folder and of those in it. Elsewhere, and where a file of them starts a server of its own, the
# tests of a file stay together. The long ones begin.
SHARING_FOLDERS = ("tests/elastic", "tests/adapters")
OWN_SERVERS = (
    "tests/adapters/components/test_served.py",
    "tests/elastic/test_http.py",
    "tests/elastic/test_cached_traffic.py",
    "tests/elastic/test_parallel_decode.py",
    "tests/elastic/test_engine_death.py",
)
# In which the control process is killed: a rank that is lost after that waits until all is imported anew.
LAST_FILES = ("tests/elastic/test_faults.py",)
LONG_FILES = (
    "tests/kernels/test_gpu_check.py",
    "tests/runtime/test_runtime.py",
    "tests/whole/test_whole.py",
)

# Whose tests run on vLLM-Omni's CPU platform, which gfdit takes where there is no accelerator.
ON_CPU_FOLDERS = ("tests/elastic", "tests/adapters", "tests/adapters/components")

# What is imported stays: to look through it for garbage again and again takes a fifth of the time of the imports.
gc.set_threshold(100_000, 20, 100)

# On a busy machine an example may take any time.
settings.register_profile(
    "no bets on speed", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no bets on speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-requests", type=int, default=8, help="requests of the soak test")
    parser.addoption("--soak-seed", type=int, default=0, help="seed of the soak test")
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel variant, not a selection")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = (*SHARING_FOLDERS, *OWN_SERVERS, *LONG_FILES)
    order = {scope: index for index, scope in enumerate(first)}
    items.sort(key=lambda item: (order.get(_scope(item.nodeid), len(first)), _file(item.nodeid) in LAST_FILES))
    on_cpu = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")
    for item in items:
        if str(PurePosixPath(_file(item.nodeid)).parent) in ON_CPU_FOLDERS:
            item.add_marker(on_cpu)


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gfdit logs is heard, also where an earlier test has put its logger under vLLM's and limited it."""
    ours, root = logging.getLogger("gfdit"), logging.getLogger()
    monkeypatch.setattr(ours, "parent", root)
    monkeypatch.setattr(ours, "propagate", True)
    if root.level > logging.WARNING:  # some modules of vLLM-Omni raise it when they are imported
        root.setLevel(logging.WARNING)
    for handler in root.handlers:
        monkeypatch.setattr(handler, "filters", [one for one in handler.filters if not isinstance(one, RateLimit)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByScope(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _scope(nodeid: str) -> str:
    file = _file(nodeid)
    shared = [folder for folder in SHARING_FOLDERS if PurePosixPath(folder) in PurePosixPath(file).parents]
    return shared[0] if shared and file not in OWN_SERVERS else file
