"""Numbers as a line of text, printed."""

from __future__ import annotations

from collections.abc import Callable

from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat

__all__ = ["Print"]

_WORDS = {
    "loss": "loss {:.6g}",
    "grad_norm": "gradient norm {:.6g}",
    "loss_scale": "loss scale {:g}",
    "samples_per_second": "{:.1f} samples/s",
    "tokens_per_second": "{:.1f} tokens/s",
}
_PHASES = ("forward", "backward", "optimizer_step")


class Print(Outlet):
    """A line on the standard output:
    `step 4: 0 skipped, learning rate 0.02, loss 2.31, gradient norm 0.8, 52.1 samples/s`.

    Args:
        every: Steps between lines.
        seconds: Lines have the mean seconds of the forward, the backward
            and the step of the optimizer.
        memory: Lines have the bytes of memory in use, by tier.
        more: Makes what a line ends with.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        seconds: bool = True,
        memory: bool = False,
        more: Callable[[], str] | None = None,
    ) -> None:
        self._every = every
        self._phases = _PHASES if seconds else ()
        self._memory = memory
        self._more = more
        super().__init__("the standard output")

    def _write(self, step: int, numbers: Numbers) -> None:
        if step % self._every:
            return
        found = {name.removeprefix("zero_fn/"): each for name, each in flat(numbers).items()}
        rates = [f"{rate:.4g}" for name, rate in found.items() if name.startswith("learning_rate/")]
        parts = [f"step {step}: {found.get('skipped_steps_total', 0):.0f} skipped"]
        parts += [f"learning rate {', '.join(rates)}"] if rates else []
        parts += [words.format(found[name]) for name, words in _WORDS.items() if name in found]
        for phase in self._phases:
            if (mean := found.get(f"{phase}_seconds/mean")) is not None:
                parts.append(f"{phase.replace('_', ' ')} {1e3 * mean:.2f} ms")
        if self._memory:
            parts += [
                f"{name} {each:.0f}" for name, each in found.items() if "memory_bytes" in name
            ]
        if self._more is not None:
            parts.append(self._more())
        print(", ".join(parts), flush=True)

    def close(self) -> None: ...
