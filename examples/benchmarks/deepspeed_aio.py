"""DeepSpeed's aio handle, for `storage.py`: moves a file once for each line it reads, and answers with seconds.

    echo read | python examples/benchmarks/deepspeed_aio.py FILE BYTES BUFFER_BYTES BLOCK_BYTES DEPTH THREADS

The handle splits a buffer over its threads, each of which keeps DEPTH blocks under way in libaio. Its memory is of the
handle's own kind, locked and aligned; other memory it would copy first.
"""

from __future__ import annotations

import os
import sys
import time

import torch


def main(file: str, size: int, buffer_nbytes: int, block_nbytes: int, depth: int, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found,unused-ignore]

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block_nbytes, depth, False, True, threads)
    buffer = handle.new_cpu_locked_tensor(buffer_nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 256)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        move = handle.async_pwrite if line.strip() == "write" else handle.async_pread
        start = time.perf_counter()
        for offset in range(0, size, buffer_nbytes):
            move(buffer[: size - offset], file, offset)
            handle.wait()
        print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
