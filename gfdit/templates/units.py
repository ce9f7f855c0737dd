"""One unit as a file: a page that describes it, then its values, then the scales of rounded ones.

The page holds a magic number, the version, and a JSON record with a checksum of its own: key, dtype, shape and the
checksum (CRC-32) of all that follows. Values begin at a page boundary, so they can be used where they are mapped.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gfdit.templates.budget import Precision
from gfdit.templates.keys import UnitKey

VERSION = 1
PAGE_BYTES = 4096
_MAGIC = b"gfdit-kv"
_START = struct.Struct("<8sIII")  # magic, version, bytes of the record, its checksum
_ALIGNED_BYTES = 64
_FP8 = torch.float8_e4m3fn
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, _FP8)
}


class DamagedError(Exception):
    """A file is not the unit that its name says. The message says what is wrong, not where."""


class Unit(NamedTuple):
    """Keys and values of one head: ``values`` (blocks, 2, tokens, head size), K first.

    If they were rounded to float8 e4m3, what they stand for is ``values * scales``, with ``scales`` float32
    (blocks, 2). Both are read-only where they come from a store: writing to them ends the process.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def exact(self, dtype: torch.dtype) -> torch.Tensor:
        """A copy in ``dtype``, (blocks, 2, tokens, head size), multiplied by its scales."""
        if self.scales is None:
            return self.values.to(dtype, copy=True)
        return (self.values.float() * self.scales[:, :, None, None]).to(dtype)


class Description(NamedTuple):
    """What a unit's first page says. ``crc`` is that of all bytes behind it."""

    key: UnitKey
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    crc: int


def prepare(values: torch.Tensor, precision: Precision) -> Unit:
    """Contiguous on the host, rounded if ``precision`` says so.

    Raises ``ValueError`` for another shape or dtype than a unit's, and for values that are not finite if they are
    to be rounded.
    """
    if values.dim() != 4 or values.shape[1] != 2 or not values.numel() or str(values.dtype)[6:] not in _DTYPES:
        allowed = ", ".join(_DTYPES)
        raise ValueError(
            f"a unit is (blocks, 2, tokens, head size) of {allowed}, not {tuple(values.shape)} of {values.dtype}"
        )
    if precision not in ("as is", "fp8"):
        raise ValueError(f"values are kept 'as is' or in 'fp8', not {precision!r}")
    values = values.detach()
    if precision == "as is" or values.dtype == _FP8:
        return Unit(values.cpu().contiguous())
    largest = values.float().abs().amax(dim=(2, 3))
    if not largest.isfinite().all():
        raise ValueError("keys or values that are not finite cannot be rounded to fp8")
    scales = torch.where(largest > 0, largest / torch.finfo(_FP8).max, 1.0)
    rounded = (values.float() / scales[:, :, None, None]).to(_FP8)
    return Unit(rounded.cpu().contiguous(), scales.cpu().contiguous())


def pack(key: UnitKey, unit: Unit) -> list[memoryview]:
    """The file's bytes, in pieces, without copies of the values."""
    values, scales = _bytes_of(unit.values), memoryview(b"")
    padding = memoryview(bytes(-len(values) % _ALIGNED_BYTES))
    if unit.scales is not None:
        scales = _bytes_of(unit.scales)
    crc = 0
    for piece in (values, padding, scales):
        crc = zlib.crc32(piece, crc)
    record = {
        "key": [str(key.template), key.step, key.branch, key.head],
        "dtype": str(unit.values.dtype).removeprefix("torch."),
        "shape": list(unit.values.shape),
        "num_bytes": PAGE_BYTES + len(values) + len(padding) + len(scales),
        "crc": crc,
    }
    text = json.dumps(record).encode()
    page = _START.pack(_MAGIC, VERSION, len(text), zlib.crc32(text)) + text
    assert len(page) <= PAGE_BYTES
    return [memoryview(page.ljust(PAGE_BYTES, b"\0")), values, padding, scales]


def describe(page: bytes, key: UnitKey, num_bytes: int) -> Description:
    """What ``page``, the first of a file of ``num_bytes``, says. Raises :class:`DamagedError`.

    Its checksum says that it was written so, not that it was written by this build.
    """
    record = _record(page)
    if record["key"] != [str(key.template), key.step, key.branch, key.head]:
        raise DamagedError("it is another unit")
    if record["num_bytes"] != num_bytes:
        raise DamagedError(f"it has {num_bytes} bytes, not {record['num_bytes']}")
    described = Description(key, record["dtype"], tuple(record["shape"]), num_bytes, record["crc"])
    end, scales_bytes = _values_end(described), 2 * described.shape[0] * torch.float32.itemsize
    if num_bytes not in (end, end + scales_bytes):
        raise DamagedError(f"it has {num_bytes} bytes, which are not {described.shape} of {described.dtype}")
    return described


def map_unit(fd: int, key: UnitKey, *, check: bool) -> Unit:
    """Map the file ``fd`` and show its values in place; they live as long as the tensors, even if the file goes.

    Its checksum is verified if ``check``. Raises :class:`DamagedError`, and ``OSError`` if it cannot be read.
    """
    num_bytes = os.fstat(fd).st_size
    described = describe(os.pread(fd, PAGE_BYTES, 0), key, num_bytes)
    mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    # Of a read-only buffer torch makes no tensor without complaint: hence by its address.
    raw = (ctypes.c_char * num_bytes).from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    raw.kept = mapped  # type: ignore[attr-defined]
    if check:
        with memoryview(mapped) as content:
            check_crc(zlib.crc32(content[PAGE_BYTES:]), described)
    values = torch.frombuffer(raw, dtype=_DTYPES[described.dtype], count=_num_values(described), offset=PAGE_BYTES)
    scales = None
    num_blocks = described.shape[0]
    if (end := _values_end(described)) < num_bytes:
        scales = torch.frombuffer(raw, dtype=torch.float32, count=num_blocks * 2, offset=end).view(num_blocks, 2)
    return Unit(values.view(described.shape), scales)


def check_crc(crc: int, described: Description) -> None:
    if crc != described.crc:
        raise DamagedError("its checksum is wrong")


def _record(page: bytes) -> dict[str, Any]:
    if len(page) < _START.size or not page.startswith(_MAGIC):
        raise DamagedError("it has no header of gfdit's")
    _, version, num_bytes, crc = _START.unpack_from(page)
    if version != VERSION:
        raise DamagedError(f"it has format {version}, this is {VERSION}")
    text = page[_START.size : _START.size + num_bytes]
    if zlib.crc32(text) != crc:
        raise DamagedError("its header's checksum is wrong")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not _is_ours(record):
        raise DamagedError("its header is none of this format")
    return record


def _is_ours(record: dict[str, Any]) -> bool:
    shape, dtype = record.get("shape"), record.get("dtype")
    return (
        "key" in record
        and all(type(record.get(name)) is int for name in ("num_bytes", "crc"))
        and isinstance(dtype, str)
        and dtype in _DTYPES
        and isinstance(shape, list)
        and len(shape) == 4
        and all(type(extent) is int and 0 < extent < 1 << 32 for extent in shape)
        and shape[1] == 2
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data


def _num_values(described: Description) -> int:
    return math.prod(described.shape)


def _values_end(described: Description) -> int:
    end = PAGE_BYTES + _num_values(described) * _DTYPES[described.dtype].itemsize
    return end + -end % _ALIGNED_BYTES


def write_all(fd: int, pieces: Sequence[memoryview]) -> None:
    """Raises ``OSError`` where there is no room."""
    for piece in pieces:
        while piece:
            piece = piece[os.write(fd, piece) :]
