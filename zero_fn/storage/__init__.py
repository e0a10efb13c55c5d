"""Memory and files in which training state rests off the device.

memory      how much the host has left
slab        one page-aligned range of host memory of exact size, pinned where it can be
request     one read or write of a file, continued until it is complete
uring       requests through io_uring; threads: the same through a few threads, where io_uring is refused
carrier     chooses between the two, once
buffers     host memory that bytes of a disk pass through
lot         byte strings put into a file for a while
file        an unnamed file of reserved size
stripes     such files on several disks, used as one
spill       blocks in them, each with its checksum and generation
shelf       room for the tensors of a module in a file or a slab, and the memory they pass through
"""

from zero_fn.storage.buffers import Buffers
from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.lot import Lot
from zero_fn.storage.memory import available
from zero_fn.storage.shelf import Shelf, shelf_of, stagings_for
from zero_fn.storage.slab import PAGE_NBYTES, Slab, whole_pages
from zero_fn.storage.spill import Spill, Transfer, Waited, wait_all

__all__ = [
    "PAGE_NBYTES",
    "Buffers",
    "Carrier",
    "Lot",
    "Shelf",
    "Slab",
    "Spill",
    "Transfer",
    "Waited",
    "available",
    "chosen_carrier",
    "shelf_of",
    "stagings_for",
    "wait_all",
    "whole_pages",
]
