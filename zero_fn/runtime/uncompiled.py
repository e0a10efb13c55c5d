"""Functions that `torch.compile` runs as they are.

[Note: what is compiled] Gathering, freeing and reducing follow a schedule and wait for other ranks: nothing to trace. The
compiler therefore breaks its graph where a unit is entered, runs this package's part in plain Python, and goes on with
the module's own forward, which it compiles with everything inside the unit. Where a graph must not break, it traces the
entry of a unit in another form: see whole_graph.py. `torch.compiler.disable` would say the same but
imports the compiler, which takes longer than all of zero_fn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["left_alone", "traced_inside", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])

_SKIP, _AS_USUAL = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


def uncompiled(function: F) -> F:
    """The same function, which is neither traced nor compiled, nor is anything it calls."""
    return _marked(function, _SKIP)


def left_alone(function: F) -> F:
    """The same function, which is neither traced nor compiled; what it calls may be."""
    return _marked(function, _AS_USUAL)


def traced_inside(function: F) -> F:
    """The same function: as `left_alone`, but the compiler traces it where it meets its call while it traces another one."""
    strategy = eval_frame._FrameExecStrategy(_SKIP, _AS_USUAL)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _marked(function: F, inner: eval_frame._FrameAction) -> F:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "zero_fn enters a unit"  # type: ignore[attr-defined]
    strategy = eval_frame._FrameExecStrategy(_SKIP, inner)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
