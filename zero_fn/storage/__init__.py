"""Memory and files in which training state rests off the device.

memory      how much memory this process may still take, and the error where that is too little
slab        one page-aligned range of host memory of exact size, pinned where it can be; ring: equal ranges of one slab
file        an unnamed file of reserved size; stripes: such files on several disks, used as one
request     one read or write of a file, continued until it is complete
carrier     carries requests: by io_uring (uring), or by a few threads where io_uring is refused
transfer    requests under way, in blocks that have a checksum and a generation
shelf       room for the tensors of a module on the host or on disks, and the staging buffers on the way to a disk
store       room for byte strings on a tier, and the buffers through which they come and go
recycled    memory of large buffers, used again by the next buffer of the size
"""

from zero_fn.storage.ring import BUFFERS, NOTHING, Ring, ring_form, ring_of
from zero_fn.storage.shelf import Disk, Shelf, shelf_of, stagings_for
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.storage.store import Store
from zero_fn.storage.transfer import Transfer, Waited, wait_all

__all__ = [
    "BUFFERS",
    "NOTHING",
    "Disk",
    "Ring",
    "Shelf",
    "Slab",
    "Store",
    "Transfer",
    "Waited",
    "ring_form",
    "ring_of",
    "shelf_of",
    "stagings_for",
    "wait_all",
    "whole_pages",
]
