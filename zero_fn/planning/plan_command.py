"""`python -m zero_fn plan`: which stages, tiers and meshes a model fits,
how long a step takes, and the code for it.

    python -m zero_fn plan config.json --ranks 64
    python -m zero_fn plan 70B --ranks 8 64 512 --device h100 --host 2TB --disk 8TB
    python -m zero_fn plan train:new_model --ranks 16 --device a100 --links links.json --json

No process group is needed, and no accelerator: the model is on `meta`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zero_fn.errors import ConfigError, ZeroError
from zero_fn.planning.code_of_plan import program_of
from zero_fn.planning.configurations import UNKNOWN, Training, compute_of, configurations, shapes_of
from zero_fn.planning.links import LinkSpeeds
from zero_fn.planning.machines import DEVICES, Machine
from zero_fn.planning.models import SHAPES, PlannedModel, model_of
from zero_fn.planning.proposals import Proposal, proposals_table
from zero_fn.values.tiers import nbytes_of_text

__all__ = ["Answer", "main", "planned"]

_COUNTS = ("per_node", "sequence", "microbatch", "microbatches", "cards")
"""Options that are numbers of at least one."""


@dataclass(frozen=True)
class Answer:
    """All that the command says. `rows`: for each number of ranks, the fastest that fits first."""

    model: PlannedModel
    training: Training
    title: str
    notes: list[str]
    rows: list[Proposal]

    @property
    def best(self) -> Proposal:
        """The first that fits, or what is nearest."""
        return next((row for row in self.rows if row.fits), self.rows[0])

    @property
    def program(self) -> str:
        """The code for it."""
        return program_of(self.best, self.model, self.training)


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Returns 0; 1 if nothing fits, or with the error if there is no plan."""
    options = _parser().parse_args(arguments)
    try:
        found = _planned_of(options)
    except (ZeroError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.json:
        data = {
            "title": found.title,
            "notes": found.notes,
            "configurations": [row.numbers(options.usd_per_hour) for row in found.rows],
            "program": found.program,
        }
        print(json.dumps(data, indent=1))
    else:
        print(_text(found, options))
    return int(not found.best.fits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn plan",
        description="What a model needs before it starts: the stages, tiers and meshes that fit, "
        "bytes of each rank, the predicted seconds of a step, and the code. No device is needed.",
        epilog=f"Devices: {', '.join(DEVICES)}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        help="config.json of Hugging Face, or its folder; module:function; "
        f"or one of {', '.join(SHAPES)}",
    )
    add("--ranks", type=int, nargs="+", default=[8], metavar="N", help="devices in all")
    add("--device", choices=DEVICES, default="h100", metavar="NAME", help="what they are")
    add("--memory", metavar="SIZE", help="memory of a device, if not that of --device")
    add("--cards", type=int, metavar="N", help="network cards of a node, if not one a device")
    add("--links", metavar="FILE", help="speeds of `python -m zero_fn links --out FILE`")
    add("--usd-per-hour", type=float, metavar="USD", help="price of a device: adds 1e9 tokens")
    for name, default, what in (
        ("--per-node", 8, "devices of a node"),
        ("--reserve", "3GB", "memory of a device for the driver, NCCL, gaps"),
        ("--host", "2TB", "memory of a node for tiers; 0 for none"),
        ("--disk", "0", "NVMe of a node for tiers; 0 for none"),
        ("--network", 400.0, "Gbit/s of a network card"),
        ("--sequence", 4096, "tokens of a sequence"),
        ("--microbatch", 1, "sequences of a microbatch"),
        ("--microbatches", 1, "microbatches of a step"),
        ("--utilisation", 0.5, "part of the peak that is attained"),
    ):
        add(name, type=type(default), default=default, metavar="N", help=what)
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="what it computes in")
    add("--states", choices=("fp32", "8bit"), default="fp32", help="states of AdamW")
    add("--all", action="store_true", help="show what does not fit, too")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")
    return parser


def planned(arguments: Sequence[str]) -> Answer:
    """What the command says with these arguments."""
    return _planned_of(_parser().parse_args(arguments))


def _planned_of(options: argparse.Namespace) -> Answer:
    """Plans.

    Raises:
        ConfigError: There is no such model, or it cannot be run on fake tensors;
            or an option makes no sense.
    """
    if options.cards is None:
        options.cards = options.per_node
    counts = [*options.ranks, *(getattr(options, name) for name in _COUNTS)]
    if min(counts) < 1 or not 0 < options.utilisation <= 1 or options.network <= 0:
        raise ConfigError(
            "A number of the command line is too small or too large.",
            got=" ".join(
                f"{name}={getattr(options, name)}"
                for name in ("ranks", *_COUNTS, "network", "utilisation")
            ),
            fix="counts of at least 1, a utilisation above 0 and at most 1, a network above 0",
        )
    for ranks in options.ranks:
        if ranks > options.per_node and ranks % options.per_node:
            raise ConfigError(
                "Nodes are not full.",
                ranks=ranks,
                per_node=options.per_node,
                fix=f"--ranks {ranks // options.per_node * options.per_node}",
            )
    training = _training_of(options)
    model = model_of(options.model, options.sequence, options.microbatch)
    notes, compute = [], [UNKNOWN]
    try:
        compute = compute_of(model, training)
    except Exception as error:  # whatever code of a model raises
        notes.append(
            "activations are not counted: on fake tensors the model raises "
            f"{type(error).__name__}: {error}"
        )
    if model.inputs is None:
        notes.append(
            "activations are not counted: nobody said what goes in; return (model, inputs)"
        )
    rows = [
        row
        for ranks in options.ranks
        for row in configurations(model, training, compute, shapes_of(ranks, options.per_node))
    ]
    numel = sum(parameter.numel() for parameter in model.module.parameters())
    counted = ", ".join(f"{ranks:,}" for ranks in options.ranks)
    title = (
        f"{options.model}: {numel / 1e9:,.2f} B parameters on {counted} x "
        f"{options.device}, {options.precision}"
    )
    memory, reserved = training.machine.device.memory / 1e9, training.reserved / 1e9
    speeds = f"of {options.links}" if options.links else "of data sheets, of which 0.8 is attained"
    notes.append(
        f"a device has {memory:,.1f} GB, of which {reserved:,.1f} GB are left to others; "
        f"{options.microbatches} x {model.tokens:,} tokens a rank and step; speeds {speeds}"
    )
    return Answer(model, training, title, notes, rows)


def _training_of(options: argparse.Namespace) -> Training:
    device = DEVICES[options.device]
    if options.memory:
        device = replace(device, memory=nbytes_of_text(options.memory, "--memory"))
    machine = Machine(
        device,
        options.per_node,
        options.cards * options.network / 8 * 1e9,
        measured=LinkSpeeds.read(options.links) if options.links else None,
    )
    return Training(
        machine,
        reserved=nbytes_of_text(options.reserve, "--reserve"),
        host=None if options.host == "0" else nbytes_of_text(options.host, "--host"),
        disk=None if options.disk == "0" else nbytes_of_text(options.disk, "--disk"),
        computes_in=torch.float32 if options.precision == "fp32" else torch.bfloat16,
        states_in_8_bits=options.states == "8bit",
        microbatches=options.microbatches,
        utilisation=options.utilisation,
    )


def _text(found: Answer, options: argparse.Namespace) -> str:
    shown = found.rows if options.all else [row for row in found.rows if row.fits] or [found.best]
    lines = [found.title, *found.notes, ""]
    if not found.best.fits:
        lines += ["Nothing fits. Nearest:"]
    lines += proposals_table(shown, options.usd_per_hour)
    if not found.best.fits:
        lines += [
            "",
            "fix: more ranks, --host or --disk, a smaller --microbatch or --sequence, "
            "--states 8bit",
        ]
    return "\n".join([*lines, "", "The first row that fits as a program:", "", found.program])
