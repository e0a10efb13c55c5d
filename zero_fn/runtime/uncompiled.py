"""Functions that `torch.compile` runs as they are.

[Note: what is compiled] Gathering, freeing and reducing follow a schedule and wait for other ranks,
which no graph can hold. So the compiler breaks its graph where a unit is entered, runs this
package's part in plain Python, and goes on with the module's own forward, which it compiles with
everything inside the unit. A graph that must not break (`fullgraph=True`) can hold the inside of
one unit and not several: the compiler refuses it with the words below. `torch.compiler.disable`
would do the same, but imports the compiler, which takes longer than importing all of zero_fn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["left_alone", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])

_WHY = (
    "zero_fn gathers a unit here, which breaks the graph: "
    "torch.compile(model) without fullgraph=True, or block.compile() for each block"
)

_SKIP, _AS_USUAL = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


def uncompiled(function: F) -> F:
    """The same function, which is neither traced nor compiled, nor is anything it calls."""
    return _marked(function, _SKIP)


def left_alone(function: F) -> F:
    """The same function, which is neither traced nor compiled; what it calls may be."""
    return _marked(function, _AS_USUAL)


def _marked(function: F, inner: eval_frame._FrameAction) -> F:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    strategy = eval_frame._FrameExecStrategy(_SKIP, inner)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
