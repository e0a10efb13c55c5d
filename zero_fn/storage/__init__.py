"""Memory and files in which training state rests off the device.

host_memory     how much memory this process may still take; ranges of exact size,
                aligned to pages, pinned where they can be
files           unnamed files of reserved size, and the stripes of a range over several
io              reads and writes of a file, in blocks that have a checksum;
                threads do them where `uring` (io_uring) may not
tier_storage    room for the tensors of a module on the host or on disks,
                and the staging buffers on the way to a disk
stored_files    files that somebody else has written, as a tier that is only read
store           room for byte strings on a tier, and the buffers through which they come and go
pool            memory of large buffers, used again by the next buffer of the size
"""

from zero_fn.storage.host_memory import Slab, whole_pages
from zero_fn.storage.io import Transfer, Waited, wait_all
from zero_fn.storage.store import Store, Stored
from zero_fn.storage.tier_storage import (
    BUFFERS,
    NOTHING,
    DiskStorage,
    InMemory,
    StagingBuffers,
    Stretch,
    TierStorage,
    staging_for,
    staging_form,
    stagings_for,
    storage_on,
)

__all__ = [
    "BUFFERS",
    "NOTHING",
    "DiskStorage",
    "InMemory",
    "Slab",
    "StagingBuffers",
    "Store",
    "Stored",
    "Stretch",
    "TierStorage",
    "Transfer",
    "Waited",
    "staging_for",
    "staging_form",
    "stagings_for",
    "storage_on",
    "wait_all",
    "whole_pages",
]
