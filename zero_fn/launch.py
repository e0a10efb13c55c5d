"""`zf.launch(train, 4)`: runs a function on local ranks, from a script or a notebook cell.

[Note: which failures start ranks again] Those that another start can heal: a rank was killed,
crashed, exited with an error, or lost another one that does not answer. An exception of the
function is a mistake that would come again, and the user wants to read it now. Status 0 and 75
(`zf.distributed.preemption`) say that a rank wants to leave. When `timeout_s` is over, so is the call: a rank
that hangs is lost, and started again, only by a shorter deadline of its peers (`zf.distributed.set_deadline`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero_fn.errors import LayoutError, LostRankError, StateError
from zero_fn.local import rank
from zero_fn.local.first_failure import RankDied
from zero_fn.local.launcher import LocalRanks
from zero_fn.local.preemption import REQUEUE

__all__ = ["launch"]

R = TypeVar("R")

_OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def launch(
    fn: Callable[..., R],
    nprocs: int,
    *args: object,
    kwargs: Mapping[str, object] | None = None,
    backend: str | None = None,
    threads: int = 1,
    timeout_s: float | None = 600.0,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[R]:
    """Runs a function on `nprocs` ranks of this machine and returns what each rank returned.

    The function may be a closure, a lambda or defined in a notebook cell or a script; a script is
    not executed again and needs no `if __name__ == "__main__"`. Ranks are processes forked from a
    server that has imported torch: the first call takes seconds, later calls tenths. In each rank
    the default process group is initialized, `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and
    `LOCAL_WORLD_SIZE` are set, and torch has `threads` threads. What rank 0 prints appears here as
    it comes; what other ranks print is shown, its last lines, with an error of theirs. Ranks end
    with the call, whatever ends it: a value, an error, Ctrl-C or the death of this process.

        def train(lr):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            ...
            return loss.item()

        losses = zf.launch(train, 4, 1e-3)

    With `restarts`, a run that loses a rank goes on: all ranks are stopped, new ones are started in
    tenths of a second, and the function is called again with the same arguments, to go on from its
    newest checkpoint. A line on stderr says which rank was lost. `TORCHELASTIC_RESTART_COUNT` is
    the number of restarts so far, as under `torchrun --max-restarts`.

    Communicates: nothing but the rendezvous, over a file.

    Args:
        fn: Called as `fn(*args, **kwargs)` on every rank. It is pickled,
            and so are arguments and results.
        nprocs: Number of ranks, at least 1.
        *args: Positional arguments of `fn`, the same on every rank.
        kwargs: Keyword arguments of `fn`.
        backend: As `init_process_group` takes it. By default gloo,
            and with it nccl if there is a GPU for every rank.
        threads: Threads of torch in each rank, at least 1.
        timeout_s: Seconds until every rank must have returned,
            restarts included; None for no limit.
        restarts: How often ranks may be started again after one was killed, crashed, exited with a
            status other than 0 and 75 (`zf.distributed.preemption`), or lost another (`LostRankError`). Other
            exceptions of the function are raised at once.
        env: Variables that every rank has beside the environment of this process. Set variables
            that torch reads when it is imported before the first call instead.

    Returns:
        The values, in the order of ranks. A value is a copy: tensors are rebuilt in this process.

    Raises:
        LayoutError: `nprocs`, `backend`, `threads`, `timeout_s`,
            `restarts` or `env` is not possible.
        StateError: This process is a rank already; or ranks cannot be started.
        TypeError: `fn` cannot be called with these arguments,
            or something cannot be pickled (`SendError`).
        RankDied: A rank was killed or exited (a StateError), and `restarts` are used up.
        RankHung: `timeout_s` is over; its notes say where each rank was (a StateError).
        Exception: What a rank raised, of its type, with the rank's traceback as `__cause__`.
            Its peers are stopped.
    """
    _check_moment()
    _check_call(fn, nprocs, args, kwargs or {})
    _check_options(nprocs, threads, timeout_s, restarts, env or {})
    chosen, restart, began_s = _backend(nprocs, backend), 0, None
    while True:
        counts = {
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        }
        try:
            environ = {**(env or {}), **counts}
            with LocalRanks(nprocs, backend=chosen, threads=threads, environ=environ) as ranks:
                # The time of the first start: `timeout_s` is for all of them.
                began_s = began_s or time.monotonic()
                return ranks.run(
                    fn, args, kwargs, timeout_s=timeout_s, since_s=began_s, is_last=True
                )
        except (RankDied, LostRankError) as error:
            if restart >= restarts or error.facts.get("exit_code") in (0, REQUEUE):
                raise  # [Note: which failures start ranks again]
            restart += 1
            print(
                f"zero_fn: {error.summary} Restart {restart} of {restarts}.",
                file=sys.stderr,
                flush=True,
            )


def _check_moment() -> None:
    why = "every rank would start ranks of its own"
    if rank.place is not None:
        fix = "call the function itself here, or launch from outside"
        raise StateError(
            "launch was called on a rank.",
            here="rank {} of {}".format(*rank.place),
            why=why,
            fix=fix,
        )
    if dist.is_available() and dist.is_torchelastic_launched():
        fix = "python train.py, without torchrun; or call the function itself here"
        raise StateError("launch was called in a process that torchrun started.", why=why, fix=fix)


def _check_call(
    fn: object, nprocs: object, args: Sequence[object], kwargs: Mapping[str, Any]
) -> None:
    if not callable(fn) or not isinstance(nprocs, int):
        raise TypeError(
            "launch takes a function, not what it returned, and a whole number of ranks; "
            f"got {fn!r} and {nprocs!r}.\n"
            f"  fix : zf.launch(train, 2, *arguments)"
        )
    # Some compiled functions have no signature: the ranks will tell.
    with contextlib.suppress(ValueError):
        inspect.signature(fn).bind(*args, **kwargs)


def _check_options(
    nprocs: int, threads: int, timeout_s: float | None, restarts: int, env: Mapping[str, str]
) -> None:
    if nprocs < 1:
        raise LayoutError("launch needs at least one rank.", nprocs=nprocs, fix="zf.launch(fn, 1)")
    if threads < 1:
        raise LayoutError(
            "A rank needs at least one thread.",
            threads=threads,
            fix="zf.launch(fn, nprocs, threads=1)",
        )
    if timeout_s is not None and not timeout_s > 0:
        fix = "timeout_s is in seconds; None for no limit: zf.launch(fn, nprocs, timeout_s=None)"
        raise LayoutError("No rank can return in no time.", timeout_s=timeout_s, fix=fix)
    if restarts < 0:
        fix = "how often ranks may be started again: zf.launch(fn, nprocs, restarts=3); 0 for never"
        raise LayoutError(
            "Ranks cannot be started again less than never.", restarts=restarts, fix=fix
        )
    if taken := ", ".join(name for name in _OWN_VARIABLES if name in env):
        fix = "leave these variables out of env"
        raise LayoutError("launch itself says which rank is which.", env=taken, fix=fix)


def _backend(nprocs: int, asked: str | None) -> str:
    gpus = (
        torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    )
    if asked is not None and "nccl" in asked and gpus < nprocs:
        fix = f"zf.launch(fn, {nprocs}, backend='gloo'), or at most {gpus} ranks"
        raise LayoutError("nccl needs a GPU for each rank.", nprocs=nprocs, gpus=gpus, fix=fix)
    return asked or ("cpu:gloo,cuda:nccl" if gpus >= nprocs else "gloo")
