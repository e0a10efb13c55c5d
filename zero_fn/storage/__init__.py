"""Memory and files in which training state rests off the device.

memory      how much the host has left
slab        one page-aligned range of host memory of exact size, pinned where it can be; ring: equal ranges of one
file        an unnamed file of reserved size; stripes: such files on several disks, used as one
request     one read or write of a file, continued until it is complete
carrier     what carries requests: uring, which is io_uring, or a few threads where that is refused
transfer    requests under way, of blocks that have a checksum and a generation
shelf       room for the tensors of a module on the host or a disk, and the memory they pass through
store       room for byte strings on a tier, and the memory in which they are used
recycled    memory of large buffers, used again by the next buffer
"""

from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.memory import available
from zero_fn.storage.ring import BUFFERS, NOTHING, Ring, ring_form, ring_of
from zero_fn.storage.shelf import Disk, Shelf, shelf_of, stagings_for
from zero_fn.storage.slab import PAGE_NBYTES, Slab, whole_pages
from zero_fn.storage.store import Store, Stored
from zero_fn.storage.transfer import Transfer, Waited, wait_all

__all__ = [
    "BUFFERS",
    "NOTHING",
    "PAGE_NBYTES",
    "Carrier",
    "Disk",
    "Ring",
    "Shelf",
    "Slab",
    "Store",
    "Stored",
    "Transfer",
    "Waited",
    "available",
    "chosen_carrier",
    "ring_form",
    "ring_of",
    "shelf_of",
    "stagings_for",
    "wait_all",
    "whole_pages",
]
