"""Group-free collectives: any ordered subset of ranks communicates, with no process group behind it.

Start reading at ``group_free_comm`` (what one can do), then ``agreement`` (why it is correct), then
``host_transport`` (how bytes move on a CPU).
"""

from gfdit.comm.errors import CommAborted, CommError, CommMismatch, CommTimeout
from gfdit.comm.group import Group
from gfdit.comm.group_free_comm import GroupFreeComm
from gfdit.comm.heap import SymmetricHeap, Transport
from gfdit.comm.heap_descriptor import HeapDescriptor
from gfdit.comm.heaps import attach_heap, create_heap
from gfdit.comm.local_heap import LocalHeap
from gfdit.comm.shared_memory_heap import SharedMemoryHeap
from gfdit.comm.spawn import RankFailed, spawn

__all__ = [
    "CommAborted",
    "CommError",
    "CommMismatch",
    "CommTimeout",
    "Group",
    "GroupFreeComm",
    "HeapDescriptor",
    "LocalHeap",
    "RankFailed",
    "SharedMemoryHeap",
    "SymmetricHeap",
    "Transport",
    "attach_heap",
    "create_heap",
    "spawn",
]
