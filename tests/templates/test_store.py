"""The store in one process: what is kept where, what gives way to what, and what is to be recorded."""

import gc
import os
from pathlib import Path

import pytest
import torch

from gfdit.templates.keys import UnitKey
from gfdit.templates.store import Tier
from tests.templates.helpers import (
    BLOCKS,
    FILE_BYTES,
    HEAD_SIZE,
    HEADS,
    TOKENS,
    Stores,
    bytes_in,
    is_right,
    put_all,
    read,
    template,
    values_of,
)

A, B, C = map(template, "abc")


def test_what_was_put_is_read_by_every_store(stores: Stores) -> None:
    one, other = stores.open(), stores.open()
    assert put_all(one, A, steps=2)
    with other.reading(A) as reading:
        for step in (0, 1):
            units = reading.heads(step, 0, range(HEADS))
            assert units is not None
            assert all(is_right(UnitKey(A, step, 0, head), unit) for head, unit in enumerate(units))
        assert reading.heads(0, 1, range(HEADS)) is None
    assert (other.counters()["hits"], other.counters()["misses"]) == (2, 1)
    assert not stores.messages


def test_ranks_record_their_own_heads(stores: Stores) -> None:
    """A pass is there once the last of them has put its share, whatever degree reads it."""
    ranks = [stores.open(), stores.open()]
    for rank, store in enumerate(ranks):
        key = UnitKey(A, 0, 0, rank)
        assert not store.has(A, 0, 0, range(2))
        store.put(key, values_of(key))
    assert all(store.has(A, 0, 0, range(2)) for store in ranks)


def test_the_first_who_puts_a_unit_wins(stores: Stores) -> None:
    store, key = stores.open(), UnitKey(A, 0, 0, 0)
    assert store.put(key, values_of(key))
    assert store.put(key, values_of(UnitKey(B, 0, 0, 0)))
    assert is_right(key, read(store, key))


def test_rounded_units_take_a_quarter_of_float32(stores: Stores) -> None:
    store, key = stores.open(), UnitKey(A, 0, 0, 0)
    large = torch.randn(BLOCKS, 2, 100 * TOKENS, HEAD_SIZE)
    assert store.put(key, large, "fp8")
    assert bytes_in(stores.shared) < 4096 + large.nbytes / 3.9
    unit = read(store, key)
    assert unit is not None and torch.allclose(unit.exact(torch.float32), large, rtol=0.07, atol=1e-2)


def test_a_hundred_times_what_the_host_holds(stores: Stores) -> None:
    store = stores.open(host_units=2 * HEADS)
    keys = [template(number) for number in range(200)]
    for key in keys:
        assert put_all(store, key)
        assert bytes_in(stores.shared) <= 2 * HEADS * FILE_BYTES
    for key in keys[::7]:
        assert store.warm(key).result()
        assert bytes_in(stores.shared) <= 2 * HEADS * FILE_BYTES
        assert all(
            is_right(unit, read(store, unit)) for unit in (UnitKey(key, 0, 0, head) for head in range(HEADS))
        )
    counts = store.counters()
    assert counts["disk_bytes"] == 200 * HEADS * FILE_BYTES and counts["host_bytes"] <= 2 * HEADS * FILE_BYTES
    assert counts["host_evictions"] >= 198 and counts["refused"] == counts["damaged"] == 0
    assert not stores.messages


def test_mapped_memory_is_given_back(stores: Stores) -> None:
    """What readers have mapped goes with their tensors, and not before."""
    store, key = stores.open(disk_units=None), UnitKey(A, 0, 0, 0)
    store.put(key, values_of(key))
    unit = read(store, key)
    store.forget(A)
    assert not bytes_in(stores.shared) and store.tier(A) is Tier.ABSENT
    assert is_right(key, unit), "what is mapped stays"
    mappings = Path("/proc/self/maps")
    assert str(stores.shared) in mappings.read_text()
    del unit
    gc.collect()
    assert str(stores.shared) not in mappings.read_text()


def test_what_was_used_longest_ago_leaves_first(stores: Stores) -> None:
    store = stores.open(host_units=2 * HEADS, disk_units=None)
    put_all(store, A)
    put_all(store, B)
    read(store, UnitKey(A, 0, 0, 0))
    put_all(store, C)
    assert [store.tier(key) for key in (A, B, C)] == [Tier.HOST, Tier.ABSENT, Tier.HOST]


def test_the_disk_is_bounded_too(stores: Stores) -> None:
    store = stores.open(host_units=HEADS, disk_units=2 * HEADS)
    for number in range(9):
        put_all(store, template(number))
        assert bytes_in(stores.path) <= 2 * HEADS * FILE_BYTES
    tiers = [store.tier(template(number)) for number in range(9)]
    assert tiers == [Tier.ABSENT] * 6 + [Tier.DISK] * 2 + [Tier.HOST]


def test_what_is_read_stays(stores: Stores) -> None:
    """In whichever process. If all of it is read, there is one message and no more is kept."""
    store, reader = stores.open(host_units=HEADS), stores.open(host_units=HEADS)
    put_all(store, A)
    with reader.reading(A):
        assert not put_all(store, B) and not put_all(store, C)
        assert store.tier(A) is Tier.HOST
        assert len(stores.messages) == 1 and "are taken by templates in use" in stores.messages[0]
    assert put_all(store, B) and store.tier(A) is Tier.DISK
    assert store.counters()["refused"] == 2 * HEADS


def test_a_unit_counts_before_it_is_written(stores: Stores) -> None:
    """So that two who write at once do not both take the last room."""
    one, other = stores.open(host_units=1), stores.open(host_units=1)
    tier = one._host.to_read()
    assert tier is not None
    new = tier.new(UnitKey(A, 0, 0, 0), FILE_BYTES)
    assert new is not None
    key = UnitKey(B, 0, 0, 0)
    with new:
        assert not other.put(key, values_of(key))
    assert other.put(key, values_of(key))


def test_changes_within_one_tick_of_the_clock_are_counted(stores: Stores) -> None:
    """A folder's time of change is as coarse as the kernel's clock."""
    store = stores.open()
    put_all(store, A)
    tier = store._host.to_read()
    assert tier is not None
    folder = stores.shared / str(A)
    before = folder.stat().st_mtime_ns
    assert tier.sizes() == {str(A): HEADS * FILE_BYTES}
    (folder / "9-0-0.kv").write_bytes(b"x" * 1000)
    os.utime(folder, ns=(before, before))
    assert tier.sizes() == {str(A): HEADS * FILE_BYTES + 1000}


def test_a_template_larger_than_the_host_is_kept_in_part(stores: Stores) -> None:
    store = stores.open(host_units=3)
    put_all(store, A)
    assert not put_all(store, B, steps=4)
    assert store.missing(B, range(4), 1, range(HEADS)) == [(1, 0), (2, 0), (3, 0)]
    assert store.tier(A) is Tier.DISK, "it had to leave, since something could be kept"


def test_saved_templates_survive_a_restart(stores: Stores) -> None:
    store = stores.open()
    put_all(store, A, steps=2)
    assert store.tier(A) is Tier.HOST
    assert store.save(A).result() and store.save(A).result()
    assert store.counters()["saved"] == 2 * HEADS
    for path in (stores.shared / str(A)).iterdir():
        path.unlink()
    assert store.tier(A) is Tier.DISK and store.tier(A, 1) is Tier.DISK and store.tier(A, 2) is Tier.ABSENT
    again = stores.open()
    assert again.warm(A).result()
    assert again.tier(A) is Tier.HOST and is_right(UnitKey(A, 1, 0, 1), read(again, UnitKey(A, 1, 0, 1)))
    counts = again.counters()
    assert counts["loaded"] == 2 * HEADS and counts["load_bytes"] == 2 * HEADS * FILE_BYTES
    assert counts["load_seconds"] > 0


def test_recording_goes_on_where_it_ended(stores: Stores) -> None:
    store = stores.open()
    assert store.missing(A, range(2), 2, range(HEADS)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    put_all(store, A)
    one_head = UnitKey(A, 1, 1, 0)
    store.put(one_head, values_of(one_head))
    assert store.missing(A, range(2), 2, range(HEADS)) == [(0, 1), (1, 0), (1, 1)]
    assert store.missing(A, [1], 2, [0]) == [(1, 0)]


def test_templates_are_listed_and_forgotten(stores: Stores) -> None:
    store, other = stores.open(), stores.open()
    store.register(A, {"name": "sofa"})
    put_all(store, B)
    listed = other.templates()
    assert set(listed) == {A, B}
    assert listed[A].description == {"name": "sofa"} and listed[A].host_bytes == 0 == listed[A].last_used_s
    assert listed[B].description is None and listed[B].host_bytes == HEADS * FILE_BYTES
    assert listed[B].last_used_s > 1e9
    for key in (A, B):
        other.forget(key)
    assert store.templates() == {} and store.counters()["host_bytes"] == 0
    with pytest.raises(ValueError, match="is no JSON"):
        store.register(A, {"name": object()})
    with pytest.raises(ValueError, match="at most 65536"):
        store.register(A, {"name": "x" * 70000})


def test_forgetting_what_is_written_harms_nobody(stores: Stores) -> None:
    writer, other = stores.open(), stores.open()
    tier = writer._host.to_read()
    assert tier is not None
    key = UnitKey(A, 0, 0, 0)
    new = tier.new(key, 10)
    assert new is not None
    with new:
        other.forget(A)
        new.commit()
    assert writer.has(A, 0, 0, [0]) and writer.reading(A)._use is not None


def test_nothing_is_removed_that_is_not_the_store_s(stores: Stores) -> None:
    for folder in (stores.path, stores.shared):
        (folder / "mine").mkdir(parents=True)
        (folder / "mine" / "0-0-0.kv").write_text("x" * 10 * FILE_BYTES)
        (folder / "mine.json").write_text("{}")
    store = stores.open(host_units=HEADS, disk_units=HEADS)
    for key in (A, B, C):
        assert put_all(store, key)
        store.forget(key)
    assert not store.templates()
    assert all((folder / "mine" / "0-0-0.kv").exists() for folder in (stores.path, stores.shared))


def test_a_stranger_s_file_in_a_template_s_folder(stores: Stores) -> None:
    """It takes room for ever, but nobody's time."""
    store = stores.open(host_units=2 * HEADS, disk_units=None)
    put_all(store, A)
    (stores.shared / str(A) / "notes").write_bytes(b"x" * FILE_BYTES)
    assert put_all(store, B) and not put_all(store, C, steps=2)
    assert bytes_in(stores.shared) <= 2 * HEADS * FILE_BYTES and (stores.shared / str(A) / "notes").exists()


def test_on_the_host_only(stores: Stores) -> None:
    store = stores.open(host_units=HEADS, disk_units=None)
    put_all(store, A)
    put_all(store, B)
    assert store.tier(A) is Tier.ABSENT and not store.save(B).result() and store.warm(A).result()
