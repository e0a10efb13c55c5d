"""Memory and files in which training state rests off the device.

memory      how much the host has left
slab        one page-aligned range of host memory of exact size, pinned where it can be
request     one read or write of a file, continued until it is complete
uring       requests through io_uring; threads: the same through a few threads, where io_uring is refused
carrier     chooses between the two, once
file        an unnamed file of reserved size
spill       blocks in such a file, each with its checksum and generation
"""

from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.memory import available
from zero_fn.storage.slab import PAGE_NBYTES, Slab, whole_pages
from zero_fn.storage.spill import Spill, Transfer

__all__ = ["PAGE_NBYTES", "Carrier", "Slab", "Spill", "Transfer", "available", "chosen_carrier", "whole_pages"]
