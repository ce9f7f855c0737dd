"""Processes killed anywhere, damaged files, tiers that are full: right values or none, and one message."""

from __future__ import annotations

import errno
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gfdit.templates import units as units_module
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.store import TemplateStore, Tier
from tests.support.thorough import thorough
from tests.templates.helpers import (
    FILE_BYTES,
    HEADS,
    Stores,
    at_call,
    bytes_in,
    in_a_fork,
    is_right,
    kill_oneself,
    put_all,
    read,
    template,
    values_of,
)

A, B, C = map(template, "abc")
UNIT = UnitKey(A, 0, 0, 0)

WORK: dict[str, Callable[[TemplateStore], object]] = {
    "put": lambda store: put_all(store, C),
    "warm": lambda store: store._warm_now(A),
    "save": lambda store: store._save_now(B),
    "forget": lambda store: store.forget(B),
    "register": lambda store: store.register(C, {"name": "sofa"}),
    "read": lambda store: read(store, UnitKey(B, 0, 0, 0)),
}
"""With room for one template on the host, where B is, and for two on disk, where A is."""


def _prepared(stores: Stores) -> TemplateStore:
    store = stores.open(host_units=HEADS, disk_units=2 * HEADS)
    for key in (A, B):
        store.forget(key)
        put_all(store, key)
    return store


def _short_writes(patch: pytest.MonkeyPatch) -> None:
    """So that there is a middle of a write."""
    write = os.write
    patch.setattr(os, "write", lambda fd, data: write(fd, data[: 1 + len(data) // 2]))


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("work", WORK)
def test_killed_at_every_call(stores: Stores, work: str, stride: int) -> None:
    """Whatever the killed one leaves is right or not there, takes no more than it may, and is in nobody's way."""
    number, status = 0, -1
    while status != 0:
        number += stride if number > 6 else 1
        before = _prepared(stores)

        def child(number: int = number) -> None:
            store = stores.open(host_units=HEADS, disk_units=2 * HEADS)
            with pytest.MonkeyPatch.context() as patch:
                _short_writes(patch)
                at_call(patch, number, kill_oneself)
                WORK[work](store)

        status = in_a_fork(child)
        assert os.WIFSIGNALED(status) or status == 0
        for store in (before, stores.open(host_units=HEADS, disk_units=2 * HEADS)):
            _check(store)
        assert put_all(store, A) and put_all(store, C), "what was left behind can be replaced"
        _check(store)
        assert not [path for path in stores.shared.rglob(".unfinished*")]
        assert bytes_in(stores.shared) <= HEADS * FILE_BYTES
        assert sum(path.stat().st_size for path in stores.path.rglob("*.kv")) <= 2 * HEADS * FILE_BYTES
        store.forget(C)
    assert number > 1 and not stores.messages


def test_what_a_killed_writer_leaves_counts_until_it_is_removed(stores: Stores) -> None:
    """And it is removed when its room is needed, by a store that was open before."""
    store = stores.open(host_units=HEADS, disk_units=None)

    def child() -> None:
        tier = stores.open(host_units=HEADS, disk_units=None)._host.to_read()
        assert tier is not None and tier.new(UNIT, HEADS * FILE_BYTES)
        kill_oneself()

    in_a_fork(child)
    assert store.counters()["host_bytes"] == HEADS * FILE_BYTES
    assert put_all(store, B)
    assert bytes_in(stores.shared) == HEADS * FILE_BYTES and not stores.messages


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_cannot_be_written(stores: Stores, tier: str, code: int) -> None:
    """At whichever write: one message, no half a unit, the other tier goes on, and later it is tried again."""
    number, failed = 0, True
    while failed:
        number += 1
        failed = False
        store = stores.open(host_units=2 * HEADS, retry_s=0.0)
        store.forget(A)
        if tier == "disk":
            assert put_all(store, A)
        stores.messages.clear()

        def fail() -> None:
            nonlocal failed
            failed = True
            raise OSError(code, os.strerror(code))

        with pytest.MonkeyPatch.context() as patch:
            at_call(patch, number, fail, ("write", "ftruncate", "rename"))
            done = store._save_now(A) if tier == "disk" else put_all(store, A)
        assert done != failed
        assert len(stores.messages) == failed, stores.messages
        if failed:
            folder = stores.path if tier == "disk" else stores.shared
            assert stores.messages[0].startswith(f"templates: {folder} cannot be used ({os.strerror(code)}), so ")
        assert not [path for path in stores.path.parent.rglob(".unfinished*")]
        if tier == "disk":
            assert store.tier(A) is Tier.HOST and is_right(UNIT, read(store, UNIT))
            assert store.save(A).result()
        assert put_all(store, A) and is_right(UNIT, read(store, UNIT))
        store.forget(A)
    assert number > 3 * HEADS


def test_a_full_disk_is_told_once_and_the_host_goes_on(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.open(host_units=HEADS)
    put_all(store, A)
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(stores.path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    for number in range(20):
        assert put_all(store, template(number))
    assert stores.messages == [
        f"templates: {stores.path} cannot be used (No space left on device), "
        "so templates that leave the host are recorded again"
    ]
    assert store.tier(template(19)) is Tier.HOST and store.tier(template(18)) is Tier.ABSENT


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_folder_that_cannot_be_one(stores: Stores, tier: str) -> None:
    """From the start; it is used once it can be."""
    folder = stores.path if tier == "disk" else stores.shared / "below"
    stores.shared = stores.shared if tier == "disk" else folder
    folder.write_text("a file")
    store = stores.open(host_units=HEADS)
    assert put_all(store, A) == put_all(store, B) == (tier == "disk")
    assert tier == "disk" or read(store, UNIT) is None
    assert len(stores.messages) == 1 and f"{folder} cannot be used" in stores.messages[0]
    assert store.counters()[f"{tier}_bytes"] == 0 and not store.warm(C).cancelled()
    folder.unlink()
    again = stores.open(host_units=HEADS)
    assert put_all(again, A) and put_all(again, B) and again.tier(A) is Tier.DISK


def test_a_lock_that_is_never_freed_holds_nobody_for_ever(stores: Stores) -> None:
    """As by a process that was stopped."""
    from gfdit.templates.locks import FileLock

    store = stores.open()
    tier = store._host.to_read()
    assert tier is not None
    tier._lock_timeout_s = 0.05
    lock = FileLock.take(stores.shared / ".lock")
    assert not store.put(UNIT, values_of(UNIT))
    assert len(stores.messages) == 1 and "another process has held" in stores.messages[0]
    assert lock is not None


DAMAGE: dict[str, tuple[str, Callable[[bytearray], bytes | bytearray]]] = {
    "value": ("its checksum is wrong", lambda file: _flipped(file, 4200)),
    "last byte": ("its checksum is wrong", lambda file: _flipped(file, len(file) - 1)),
    "magic": ("no header", lambda file: _flipped(file, 0)),
    "version": ("it has format 254, this is 1", lambda file: _flipped(file, 8)),
    "record": ("its header's checksum is wrong", lambda file: _flipped(file, 40)),
    "truncated": ("bytes, not", lambda file: file[:-1]),
    "extended": ("bytes, not", lambda file: file + b"\0"),
    "empty": ("no header", lambda file: b""),
    "half a page": ("bytes, not", lambda file: file[:2000]),
}


def _flipped(file: bytearray, at: int) -> bytearray:
    file[at] ^= 255
    return file


def _path(folder: Path, key: UnitKey) -> Path:
    return folder / str(key.template) / f"{key.step}-{key.branch}-{key.head}.kv"


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_never_used(stores: Stores, tier: str, damage: str) -> None:
    """It is told once, removed, and can be recorded again; the rest of the template stays."""
    told, spoil = DAMAGE[damage]
    writer = stores.open()
    put_all(writer, A)
    path = _path(stores.shared, UNIT)
    if tier == "disk":
        assert writer.save(A).result()
        for unit in (stores.shared / str(A)).iterdir():
            unit.unlink()
        path = _path(stores.path, UNIT)
    path.write_bytes(spoil(bytearray(path.read_bytes())))
    store = stores.open()
    assert tier == "host" or store.warm(A).result()
    assert read(store, UNIT) is None and read(store, UNIT) is None
    assert len(stores.messages) == 1, stores.messages
    assert stores.messages[0].startswith(f"templates: {path} is damaged (") and told in stores.messages[0]
    assert store.counters()["damaged"] == 1 and not path.exists()
    other = UnitKey(A, 0, 0, 1)
    assert is_right(other, read(store, other))
    assert store.missing(A, [0], 1, range(HEADS)) == [(0, 0)]
    assert put_all(store, A) and is_right(UNIT, read(store, UNIT))


def test_another_unit_s_file_is_not_used(stores: Stores) -> None:
    store = stores.open()
    put_all(store, A)
    put_all(store, B)
    os.replace(_path(stores.shared, UnitKey(B, 0, 0, 0)), _path(stores.shared, UNIT))
    assert read(store, UNIT) is None and "it is another unit" in stores.messages[0]


def test_without_the_checksum_damage_would_be_used(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above."""
    put_all(stores.open(), A)
    path = _path(stores.shared, UNIT)
    path.write_bytes(_flipped(bytearray(path.read_bytes()), 4200))
    monkeypatch.setattr(units_module, "check_crc", lambda crc, described: None)
    unit = read(stores.open(), UNIT)
    assert unit is not None and not is_right(UNIT, unit)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.integers(0, FILE_BYTES - 1), st.integers(1, 255))
def test_any_byte_may_be_wrong(stores: Stores, at: int, change: int) -> None:
    store = stores.open(on_message=lambda _: None)
    store.put(UNIT, values_of(UNIT))
    path = _path(stores.shared, UNIT)
    file = bytearray(path.read_bytes())
    file[at] ^= change
    path.write_bytes(file)
    unit = read(stores.open(on_message=lambda _: None), UNIT)
    assert unit is None or is_right(UNIT, unit)
    assert unit is None or at < 4096, "only what fills up the first page means nothing"
    store.forget(A)


HOST_UNITS, DISK_UNITS = 3 * HEADS, 6 * HEADS


@pytest.mark.parametrize("seed", [0, *thorough((1, 2))])
def test_processes_that_write_evict_and_read(stores: Stores, seed: int) -> None:
    """Each sees right values or none, and bytes within bounds, while others are killed anywhere."""
    children = [_storm(stores, random.Random(10 * seed + child), None) for child in range(2)]
    killed = 0
    for number in range(8):
        doomed = random.Random(100 * seed + number)
        child = _storm(stores, doomed, doomed.randrange(20, 600))
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert killed > 2
    store = stores.open(HOST_UNITS, DISK_UNITS)
    _check(store, [template(number) for number in range(10)])
    assert put_all(store, template(0), steps=2)
    for folder in (stores.shared, stores.path):
        assert not list(folder.rglob(".unfinished*"))


def _storm(stores: Stores, chance: random.Random, killed_at: int | None) -> int:
    """The process id of one that does this and that."""
    if child := os.fork():
        return child
    status = 1
    try:
        store = stores.open(HOST_UNITS, DISK_UNITS)
        with pytest.MonkeyPatch.context() as patch:
            if killed_at is not None:
                at_call(patch, killed_at, kill_oneself)
            for _ in range(60):
                key = template(chance.randrange(10))
                work = chance.choice(["put", "put", "read", "read", "warm", "save", "forget", "list"])
                if work == "put":
                    put_all(store, key, steps=2)
                elif work == "warm":
                    store._warm_now(key)
                elif work == "save":
                    store._save_now(key)
                elif work == "forget" and chance.random() < 0.2:
                    store.forget(key)
                elif work == "list":
                    store.templates()
                _check(store, [key])
                assert all("taken by templates in use" in message for message in stores.messages), stores.messages
        status = 0
    except BaseException:
        traceback.print_exc()
        print(*stores.messages, sep="\n")
    finally:
        os._exit(status)


def _check(store: TemplateStore, keys: list[TemplateKey] | None = None) -> None:
    for key in keys or [A, B, C]:
        with store.reading(key) as reading:
            for unit_key in (UnitKey(key, step, 0, head) for step in (0, 1) for head in range(HEADS)):
                unit = reading.get(*unit_key[1:])
                assert unit is None or is_right(unit_key, unit)
    for place in store._places():
        tier = place.to_read()
        assert tier is not None and sum(tier.sizes().values()) <= tier.limit_bytes
