"""Process groups of gloo with one thread each.

[Note: two threads and one name] torch gives each group two threads for its collectives. Both write
the name of the collective that they completed last into one string of the group, without a lock
(`pgStatus_->lastCompletedWorkName`, ProcessGroupGloo.cpp of torch 2.11 to 2.15). The name of
DTensor's all-gathers, ALLGATHER_COALESCED, is too long to lie in the string object itself, so if
both threads write at once, memory is freed twice. About one all-gather in 300,000 ended the process
so, in a thread of gloo and a few collectives later. With one thread this cannot happen. Collectives
of a group then run one after the other, as they do on NCCL; those of other groups, and messages
from rank to rank, do not wait for them.

[Note: a thread that polls] A network interface of gloo has a thread that wakes 100 times a
second, and torch makes one for each group. So groups share theirs: 180 such threads took a
sixth of two cores.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from typing import Any

import torch.distributed as dist

__all__ = ["give_groups_one_thread", "loopback"]


def give_groups_one_thread() -> None:
    """Gives every group of gloo that this process makes from now on one thread for its
    collectives, in place of two. [Note: two threads and one name]

    `import zero_fn` calls it: a mesh makes the first group before the first transform. Ranks of
    `launch` call it, too, because they meet before they import zero_fn.
    """
    gloo: Any = getattr(dist, "ProcessGroupGloo", None)  # None in a torch without gloo
    if gloo is not None and not hasattr(gloo.__init__, "__wrapped__"):
        gloo.__init__ = _with_one_thread(gloo, gloo.__init__)


def _with_one_thread(gloo: Any, make: Callable[..., None]) -> Callable[..., None]:
    @wraps(make)
    def made(
        self: object,
        store: object,
        rank: int,
        size: int,
        *chosen: object,
        timeout: timedelta | None = None,
        **named: Any,
    ) -> None:
        if chosen or timeout is None:  # a caller other than torch's `new_group`
            make(
                self,
                store,
                rank,
                size,
                *chosen,
                **({} if timeout is None else {"timeout": timeout}),
                **named,
            )
            return
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = _devices(gloo, os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        for name, value in named.items():  # enable_reconfigure, since torch 2.15
            setattr(options, name, value)
        make(self, store, rank, size, options)

    return made


@cache
def _devices(gloo: Any, interfaces: str, _process: int) -> list[object]:
    """The network interfaces that torch would choose, for all groups of a process.
    [Note: a thread that polls]"""
    if interfaces:
        return [gloo.create_device(interface=interface) for interface in interfaces.split(",")]
    return [gloo.create_default_device()]


def loopback() -> str | None:
    """The name of the loopback interface, over which gloo connects ranks of one host;
    else it resolves the host's name."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
