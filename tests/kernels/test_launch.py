"""Launching: one variant per kernel and constants whatever values come, and nothing compiled while serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gfdit.comm import GroupFreeComm
from tests.comm.worlds import open_world
from tests.kernels.worlds import InterpretedHeap

if TYPE_CHECKING:
    from gfdit.kernels.compiled import Variant

CONSTANTS: dict[str, Any] = {"GROUP": 256, "PACKED": True, "TMA": False, "WIDTH": 16, "BLOCK": 65536, "PTX": True}


class RecordingLoader:
    """Stands in for compiling on a GPU."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.enqueued: list[tuple[int, tuple[object, ...]]] = []

    def __call__(self, variants: Sequence[Any]) -> list[Any]:
        assert variants
        self.loaded += variants
        return [lambda num_programs, arguments: self.enqueued.append((num_programs, arguments))] * len(variants)


def warm_launcher(*, strict: bool = False):
    from gfdit.kernels.launch import Launcher
    from gfdit.kernels.variants import all_variants

    loader = RecordingLoader()
    launcher = Launcher(loader, strict=strict)
    num_variants = launcher.warm_up(all_variants(8, ptx=True))
    assert num_variants == len(loader.loaded) == len(set(loader.loaded)) > 0
    assert launcher.warm_up(all_variants(8, ptx=True)) == 0
    return launcher, loader


def test_a_warm_launcher_compiles_nothing_whatever_the_values() -> None:
    from gfdit.kernels.launch import BULK
    from gfdit.kernels.push_exchange import push_exchange

    launcher, loader = warm_launcher(strict=True)
    num_loaded = len(loader.loaded)
    launch = launcher.prepare(push_exchange, 3, BULK, **CONSTANTS)
    for value in (0, 1, 16, 17, 2**31, 2**40, -1):
        launch(None, value, value)
    assert len(loader.loaded) == num_loaded and not launcher.late
    assert loader.enqueued[0] == (3, (None, 0, 0, 256, True, False, 16, 65536, True))


def test_an_unknown_variant_is_recorded_or_refused() -> None:
    from gfdit.kernels.launch import BULK, LaunchShape
    from gfdit.kernels.push_exchange import push_exchange

    launcher, loader = warm_launcher()
    for _ in range(2):
        launcher.prepare(push_exchange, 1, BULK, **{**CONSTANTS, "BLOCK": 12345})()
    assert [dict(variant.constants)["BLOCK"] for variant in launcher.late] == [12345]
    assert len(loader.enqueued) == 2
    launcher, loader = warm_launcher(strict=True)
    with pytest.raises(RuntimeError, match=r"not compiled before serving: push_exchange\(.*BLOCK=12345"):
        launcher.prepare(push_exchange, 1, BULK, **{**CONSTANTS, "BLOCK": 12345})
    with pytest.raises(RuntimeError, match="num_warps=16"):
        launcher.prepare(push_exchange, 1, LaunchShape(16), **CONSTANTS)
    assert not loader.enqueued


def test_constants_in_another_order_are_our_mistake() -> None:
    from gfdit.kernels.launch import BULK
    from gfdit.kernels.push_exchange import push_exchange

    launcher, _ = warm_launcher()
    with pytest.raises(TypeError, match="in the order"):
        launcher.prepare(push_exchange, 1, BULK, **dict(reversed(CONSTANTS.items())))


def test_types_do_not_depend_on_values() -> None:
    from gfdit.kernels.compiled import Variant, constant_names, signature
    from gfdit.kernels.push_exchange import push_exchange
    from gfdit.kernels.ulysses_exchange import ulysses_exchange

    types = signature(Variant.of(push_exchange, **CONSTANTS))
    assert list(types) == push_exchange.arg_names
    told = types["members"]
    assert told.lane == told.table == "*i64" and types["source"] == told.size == told.ranks_low == "i64"
    # The launcher appends the constants to the arguments.
    assert tuple(types)[-len(CONSTANTS) :] == tuple(CONSTANTS) == constant_names(push_exchange)
    constants = {name: value for name, value in CONSTANTS.items() if name != "TMA"}
    heads = Variant.of(ulysses_exchange, tuples=((2, 2), (5, 5)), GATHER=False, DIRECT=False, **constants)
    assert signature(heads)["addresses"] == (("i64",) * 2,) * 2
    assert signature(heads)["strides"] == (("i64",) * 5,) * 2
    with pytest.raises(TypeError, match="takes the constants"):
        Variant.of(push_exchange, GROUP=4)


def test_without_a_gpu_and_without_the_interpreter_there_is_one_clear_line() -> None:
    from gfdit.kernels.launch import BULK, Launcher
    from gfdit.kernels.push_exchange import push_exchange

    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        Launcher().prepare(push_exchange, 1, BULK, **{**CONSTANTS, "PTX": False})


def every_operation(comm: GroupFreeComm) -> tuple[list[str], list[str]]:
    """What was launched late although all but those with tables were warmed up, and those with tables."""
    from gfdit.kernels.launch import launcher
    from gfdit.kernels.variants import all_variants

    packed: dict[bool, list[Variant]] = {True: [], False: []}
    for variant in all_variants(comm.world_size, ptx=False):
        packed[bool(dict(variant.constants).get("PACKED", True))].append(variant)
    assert launcher.warm_up(packed[True]) > 10
    for ranks in ((0, 1, 2), (2, 0)):
        if comm.rank not in ranks:
            continue
        group = comm.group(ranks)
        comm.barrier(group)
        for num_bytes in (1, 52, 4096):
            out = torch.empty(len(group) * num_bytes, dtype=torch.uint8)
            comm.all_gather_into_tensor(out, torch.zeros(num_bytes, dtype=torch.uint8), group)
            comm.all_to_all_single(out.clone(), out, group)
            comm.all_reduce(out, group)
        # One row to the first member, two to the second, ...
        rows = [index + 1 for index in range(len(group))]
        received = torch.empty(len(group) * rows[group.index], 4)
        comm.all_to_all_single(received, torch.zeros(sum(rows), 4), group, [rows[group.index]] * len(group), rows)
        heads = torch.zeros(1, 2, 6, 8)
        own = comm.scatter_heads((heads, heads, heads), group)[0]
        comm.gather_heads(own, group)
    comm.barrier(comm.group((0, 1, 2)))
    return [str(variant) for variant in launcher.late], [str(variant) for variant in packed[False]]


@pytest.mark.thorough
def test_the_list_of_variants_is_complete() -> None:
    """Nothing else is launched; and, as a negative control, what was not warmed up is noticed."""
    with open_world(3, slot_bytes=2048) as world:
        world.start_all(every_operation, heap_class=InterpretedHeap)
        results = [world.result(rank, timeout_s=200) for rank in range(3)]
    for late, with_tables in results:
        assert late and set(late) <= set(with_tables), late


def test_every_group_size_of_a_world_has_its_variant() -> None:
    from gfdit.kernels.variants import all_variants

    def sizes(world_size: int, packed: bool) -> set[object]:
        constants = [dict(variant.constants) for variant in all_variants(world_size, ptx=True)]
        return {each["SIZE"] for each in constants if "SIZE" in each and each.get("PACKED", True) is packed}

    assert sizes(8, True) == {2, 4, 8} and not sizes(8, False)
    assert sizes(72, True) == {2, 4, 8, 16} and sizes(72, False) == {32, 64, 128}
