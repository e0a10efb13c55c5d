"""Methods of DeepSpeed's engine as functions of a setup, for a loop that cannot be rewritten yet.

backward(setup, loss)    engine.backward(loss)
step(setup)              engine.step(), after each microbatch: a step is made after the last of them
is_boundary(setup)       engine.is_gradient_accumulation_boundary()
save_checkpoint(...)     engine.save_checkpoint(...)
load_checkpoint(...)     engine.load_checkpoint(...), which reads DeepSpeed's folders, too
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zero_fn.checkpoint import load, save
from zero_fn.deepspeed.setup import DeepSpeedSetup
from zero_fn.errors import StateError

__all__ = ["backward", "is_boundary", "load_checkpoint", "save_checkpoint", "step"]


def is_boundary(setup: DeepSpeedSetup[Any]) -> bool:
    """Whether the microbatch that is computed now is the last of its step."""
    return (setup.micro_steps + 1) % setup.accumulation_steps == 0


def backward(setup: DeepSpeedSetup[Any], loss: Tensor) -> None:
    """Runs the backward of one microbatch: `setup.scaled(loss).backward()`.

    Communicates, as DeepSpeed does: at stages 2 and 3 gradients of each microbatch, below once a
    step. (`zf.accumulate` around a step of your own makes it once at every stage.)
    """
    is_last = is_boundary(setup)
    if setup.settings.sharding.stage < 2 and not is_last:
        setup.window.begin(setup.model)
    with setup.window.dropped_on_error():
        setup.scaled(loss).backward()  # type: ignore[no-untyped-call]
    if is_last:
        setup.window.end()


def step(setup: DeepSpeedSetup[Any]) -> None:
    """Ends a microbatch, and after the last one makes a step: `setup.step()`."""
    is_last = is_boundary(setup)
    setup.micro_steps += 1
    if is_last:
        setup.step()


def save_checkpoint(
    setup: DeepSpeedSetup[Any],
    folder: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Saves all of a setup, and what the program gives, as `folder/tag`; by default the tag is
    "global_step" and the steps.

    All ranks call it, between steps. In the background if the config's
    checkpoint writer is decoupled.

    Raises:
        StateError: In the middle of a step.
        CheckpointError, StorageError, DisagreementError, LostRankError: As `zf.save`.
    """
    if setup.micro_steps % setup.accumulation_steps:
        raise StateError(
            "A checkpoint is saved between steps.",
            microbatches=f"{setup.micro_steps % setup.accumulation_steps} of "
            f"{setup.accumulation_steps}",
            fix="call save_checkpoint after the step of the last microbatch",
        )
    path = Path(folder, tag or f"global_step{setup.steps}")
    extra = {"setup": setup, "client_state": dict(client_state or {})}
    save(path, setup.model, setup.optimizer, extra=extra, background=setup.settings.in_background)


def load_checkpoint(
    setup: DeepSpeedSetup[Any], folder: str | os.PathLike[str], tag: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Loads what `save_checkpoint` or DeepSpeed has saved: `folder/tag`,
    or the newest in the folder.

    All ranks call it.

    Of DeepSpeed's: parameters, states, counts of steps, the position of the scheduler, and the
    client state. Its loss scale is not read: it begins anew.

    Returns:
        The path, and the client state.

    Raises:
        CheckpointError, StorageError, DisagreementError, LostRankError: As `zf.load`.
    """
    path = Path(folder, tag) if tag else Path(folder)
    found = load(path, setup.model, setup.optimizer)
    if "setup" in found:
        setup.load_state_dict(found["setup"])
        return str(path), dict(found["client_state"])
    setup.resume(found.pop("global_steps"), found.pop("skipped_steps"))
    rates = found.pop("lr_scheduler", None)
    if setup.scheduler is not None and rates is not None:
        setup.scheduler.load_state_dict({"last_epoch": rates["last_batch_iteration"] + 1})
    return str(path), found
