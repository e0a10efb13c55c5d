"""Memory and files in which training state rests off the device.

memory      how much the host has left
slab        one page-aligned range of host memory of exact size, pinned where it can be; ring: equal ranges of one
file        an unnamed file of reserved size; stripes: such files on several disks, used as one
request     one read or write of a file, continued until it is complete
carrier     what carries requests: uring, which is io_uring, or a few threads where that is refused
transfer    requests under way, of blocks that have a checksum and a generation
shelf       room for the tensors of a module on the host or a disk, and the memory they pass through
lot         byte strings put on a disk for a while
recycled    large buffers that come and go
"""

from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.lot import Lot
from zero_fn.storage.memory import available
from zero_fn.storage.ring import Ring
from zero_fn.storage.shelf import Disk, Shelf, shelf_of, stagings_for
from zero_fn.storage.slab import PAGE_NBYTES, Slab, whole_pages
from zero_fn.storage.transfer import Transfer, Waited, wait_all

__all__ = [
    "PAGE_NBYTES",
    "Carrier",
    "Disk",
    "Lot",
    "Ring",
    "Shelf",
    "Slab",
    "Transfer",
    "Waited",
    "available",
    "chosen_carrier",
    "shelf_of",
    "stagings_for",
    "wait_all",
    "whole_pages",
]
