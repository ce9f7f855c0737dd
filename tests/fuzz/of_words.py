"""Words on the command line that are read by more than a number."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from gfdit.comm.devices import names_of
from gfdit.core.cost.nodes import Nodes
from gfdit.core.policy.loading import known_policies, load_policy
from gfdit.sim.device_memory import DeviceMemory
from gfdit.sim.importers import Condition
from gfdit.sim.rank_faults import RankFailure, SlowRank
from gfdit.sim.shares import Shares, name_of, shape_of
from tests.fuzz.mutation import mutated_bytes
from tests.fuzz.targets import Target

_POLICIES = tuple(known_policies())


def _sizes(text: str) -> None:
    shares = Shares.parse(text, shape_of, "--sizes")
    for shape in shares.values:
        assert shape_of(name_of(shape)) == shape
    shares.at(0.5)


def _nodes(text: str) -> None:
    Nodes.of_links(2, text)


def _devices(text: str) -> None:
    names_of(text.split(","), text.count(",") + 1)


_READERS: tuple[Callable[[str], object], ...] = (
    RankFailure.parse,
    SlowRank.parse,
    DeviceMemory.parse,
    Condition.parse,
    _sizes,
    _nodes,
    _devices,
)


def _word(data: bytes) -> None:
    """Each reader takes it or refuses it, and one is enough."""
    text, refused = _text(data), []
    for read in _READERS:
        try:
            read(text)
        except ValueError as error:
            if type(error) is not ValueError or not any(word in str(error) for word in ("must be", "neither")):
                raise
            refused.append(error)
    if len(refused) == len(_READERS):
        raise refused[0]


def _text(data: bytes) -> str:
    """As on a command line; but what is not UTF-8 there is told to stderr, which escapes it."""
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def _policy(data: bytes) -> None:
    """``NAME KEY=VALUE …``: of those that come with gfdit, and others."""
    name, *pairs = _text(data).split(" ")
    if "/" in name or name.endswith(".py"):
        return  # a file: that is a target of its own
    load_policy(name, dict(pair.partition("=")[::2] for pair in pairs))


_PAIRS = st.lists(
    st.tuples(
        st.sampled_from(
            ("group_size", "patience", "share", "seed", "degree", "lending", "sp", "x", "min_efficiency")
        ),
        st.sampled_from(("1", "0", "-1", "nan", "inf", "1e400", "none", "true", "9" * 5000, "0.5"))
        | st.text(max_size=4),
    ),
    max_size=2,
)
_POLICY = st.tuples(st.sampled_from(_POLICIES), _PAIRS).map(
    lambda found: " ".join([found[0], *(f"{key}={value}" for key, value in found[1])]).encode("utf-8", "replace")
)

TARGETS: tuple[Target, ...] = (
    Target("words of options", _word, mutated_bytes, weight=2),
    Target(
        "policies and their arguments",
        _policy,
        mutated_bytes,
        lambda: _POLICY,
        names=("policy",),
        weight=1,
    ),
)
