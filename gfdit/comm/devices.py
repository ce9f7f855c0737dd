"""Which CUDA device each rank works on: by default the one of its number, else the one that is named for it.

A name is an index among the devices that the rank's own process sees, as text, or the UUID of a GPU, as
``nvidia-smi -L`` prints it: that finds the device whatever ``CUDA_VISIBLE_DEVICES`` a process was started with.
Ranks may share a device. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GPU = "GPU-"


def names_of(devices: Sequence[str | int], world_size: int) -> tuple[str, ...]:
    """The name for every rank; none for the default. Raises ValueError if they are not as many as ranks."""
    names = tuple(str(device).strip() for device in devices)
    if names and len(names) != world_size:
        raise ValueError(f"{world_size} ranks need as many devices, named are {len(names)}: {', '.join(names)}")
    for rank, name in enumerate(names):
        if not name.isdecimal() and not name.upper().startswith(_GPU):
            raise ValueError(f"rank {rank}: {name!r} is neither the index of a CUDA device nor a UUID ('GPU-...')")
    return names


def check_devices(world_size: int, devices: Sequence[str] = ()) -> None:
    """Raises ValueError if torch has no CUDA, or has not the device of each rank.

    For the process that starts the ranks: CUDA is not initialised here. UUIDs that the driver does not tell are
    left to the ranks.
    """
    if torch.version.cuda is None:
        raise ValueError(f"symmetric memory needs a torch built for CUDA, this is torch {torch.__version__}")
    num_devices = torch.cuda.device_count()
    if not devices:
        if num_devices < world_size:
            raise ValueError(f"a heap of {world_size} ranks needs as many CUDA devices, torch sees {num_devices}")
        return
    uuids = _uuids_by_driver()

    def exists(name: str) -> bool:
        if name.isdecimal():
            return int(name) < num_devices
        return uuids is None or f"{_GPU}{_bare(name)}" in uuids

    missing = [f"{name} (rank {rank})" for rank, name in enumerate(devices) if not exists(name)]
    if missing:
        known = f"torch sees {num_devices}" + (f", the driver {_listed(sorted(uuids))}" if uuids else "")
        raise ValueError(f"there is no CUDA device {_listed(missing)}; {known}")


def own_device(rank: int, devices: Sequence[str] = ()) -> torch.device:
    """The device of ``rank`` as its own process, which this is, counts them. Initialises CUDA for a UUID.

    Raises ValueError naming the device and those that this process sees, if it is not one of them.
    """
    name = devices[rank] if devices else str(rank)
    if (index := _index_of(name)) is not None:
        return torch.device("cuda", index)
    num_devices = torch.cuda.device_count()
    if name.isdecimal():
        seen = f"{num_devices} devices"
    else:
        seen = _listed([f"{_GPU}{_uuid(index)}" for index in range(num_devices)]) or "no device"
    raise ValueError(f"rank {rank} is to work on CUDA device {name}, but its process sees {seen}")


def check_peer_access(rank: int, world_size: int, devices: Sequence[str] = ()) -> None:
    """Raises ValueError if the device of ``rank`` cannot address the memory of another rank's.

    Of devices that this process does not see, mapping their memory tells.
    """
    own = own_device(rank, devices).index
    for peer in range(world_size):
        other = _index_of(devices[peer] if devices else str(peer))
        if other is not None and other != own and not torch.cuda.can_device_access_peer(own, other):
            raise ValueError(f"CUDA device {own} cannot address the memory of device {other} (no peer access)")


def _index_of(name: str) -> int | None:
    """Among the devices that this process sees."""
    indices = range(torch.cuda.device_count())
    if name.isdecimal():
        return int(name) if int(name) in indices else None
    return next((index for index in indices if _uuid(index) == _bare(name)), None)


def _uuid(index: int) -> str:
    return _bare(str(torch.cuda.get_device_properties(index).uuid))


def _uuids_by_driver() -> set[str] | None:
    """Of all GPUs of this machine; None where torch or the driver does not say."""
    ask = getattr(torch.cuda, "_raw_device_uuid_nvml", lambda: None)
    try:
        uuids = ask()
    except (OSError, AttributeError):  # no library of the driver, or an old one
        return None
    return None if uuids is None else {f"{_GPU}{_bare(uuid)}" for uuid in uuids}


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix(_GPU.lower())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
