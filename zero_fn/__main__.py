"""`python -m zero_fn COMMAND`: each command is a module with `main(arguments) -> exit status`,
imported when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "checkpoint": (
        "zero_fn.checkpoint.command",
        "list checkpoints, verify them, convert them into other formats",
    ),
    "env": (
        "zero_fn.planning.environment",
        "what is installed, what zero_fn will use, and what is missing",
    ),
    "launch": (
        "zero_fn.deepspeed.launch_command",
        "start a program as the deepspeed launcher does, by torchrun",
    ),
    "plan": (
        "zero_fn.planning.plan_command",
        "what a model needs, which configurations fit, and how long a step takes",
    ),
    "deepspeed": (
        "zero_fn.deepspeed.check_command",
        "check a DeepSpeed config: what becomes of it, what a model needs by it",
    ),
    "links": (
        "zero_fn.planning.measured",
        "measure memory, disks, and what lies between ranks of this machine",
    ),
}
"""By its name, the module of a command and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns the exit status: 2 if there is no such command, else that of the command.
    """
    rows = "".join(f"\n  {name:<12} {what}" for name, (_, what) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn",
        description=f"Tools of zero_fn.\n{rows}\n\npython -m zero_fn COMMAND "
        "--help says more of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those above")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command"
    )
    given = parser.parse_args(arguments)
    status: int = import_module(COMMANDS[given.command][0]).main(given.rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
