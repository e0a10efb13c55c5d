"""`python -m zero_fn plan`: which stages, tiers and meshes a model fits,
how long a step takes, and the code for it.

    python -m zero_fn plan config.json --ranks 64
    python -m zero_fn plan 70B --ranks 8 --device h100 --host 2TB --disk 8TB --html plan.html
    python -m zero_fn plan train:new_model --ranks 16 --device a100 --links links.json --json

No process group is needed, and no accelerator: the model is on `meta`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_fn.errors import ConfigError, ZeroError
from zero_fn.inspect.table import table
from zero_fn.planning.activations import Compute
from zero_fn.planning.configurations import (
    Configuration,
    Training,
    compute_of,
    configurations,
    shapes_of,
)
from zero_fn.planning.links import LinkSpeeds
from zero_fn.planning.machines import DEVICES, Machine
from zero_fn.planning.models import SHAPES, model_of
from zero_fn.planning.pasted import deepspeed_of, program_of
from zero_fn.planning.plan_page import page_of
from zero_fn.planning.scale import ScaleRow, first_to_bite, rank_counts, scale
from zero_fn.values.tiers import nbytes_of_text

__all__ = ["Found", "main", "planned", "training_of"]

_SCALE_FROM = 512  # ranks


@dataclass(frozen=True)
class Found:
    """All that the command says."""

    title: str
    notes: list[str]
    memory: int  # of a device
    rows: list[Configuration]
    scale: list[ScaleRow]
    program: str
    deepspeed: dict[str, Any] | str


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Returns 0; 1 if nothing fits, or with the error if there is no plan."""
    options = _parser().parse_args(arguments)
    try:
        found = _planned_of(options)
        if options.html:
            shown = _shown(found.rows, options)
            page = page_of(found.title, found.notes, _rows(shown, options), shown, found.memory)
            Path(options.html).write_text(page)
    except (ZeroError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_data(found, options), indent=1) if options.json else _text(found, options))
    return int(not found.rows[0].proposal.fits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn plan",
        description="What a model needs before it starts: the stages, tiers and meshes that fit, "
        "bytes of each rank, the predicted seconds of a step, and the code. No device is needed.",
        epilog=f"Devices: {', '.join(DEVICES)}.",
    )
    add = parser.add_argument
    add(
        "model",
        help="config.json of Hugging Face, or its folder; module:function; "
        f"or one of {', '.join(SHAPES)}",
    )
    add("--ranks", type=int, default=8, help="devices in all (default: %(default)s)")
    add("--per-node", type=int, default=8, help="devices of a node (default: %(default)s)")
    add(
        "--device",
        choices=DEVICES,
        default="h100",
        metavar="NAME",
        help="what they are (default: %(default)s)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="memory of a device, such as 80GB (default: that of --device)",
    )
    add(
        "--reserve",
        metavar="SIZE",
        default="3GB",
        help="of it for the driver, NCCL, gaps (default: %(default)s)",
    )
    add(
        "--host",
        metavar="SIZE",
        help="memory of a node for tiers (default: 2TB); 0 for none",
        default="2TB",
    )
    add(
        "--disk",
        metavar="SIZE",
        help="NVMe of a node for tiers, such as 8TB (default: none)",
        default="0",
    )
    add(
        "--network",
        type=float,
        default=400,
        metavar="GBIT",
        help="Gbit/s of a network card (default: %(default)s)",
    )
    add(
        "--cards",
        type=int,
        metavar="N",
        help="network cards of a node (default: one for each device)",
    )
    add(
        "--links",
        metavar="FILE",
        help="speeds that `python -m zero_fn links --out FILE` measured on the machine",
    )
    add(
        "--sequence",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="tokens of a sequence (default: %(default)s)",
    )
    add(
        "--microbatch",
        type=int,
        default=1,
        metavar="N",
        help="sequences of a microbatch (default: %(default)s)",
    )
    add(
        "--microbatches",
        type=int,
        default=1,
        metavar="N",
        help="microbatches of a step (default: %(default)s)",
    )
    add(
        "--precision",
        choices=("bf16", "fp32"),
        default="bf16",
        help="what it computes in (default: %(default)s)",
    )
    add(
        "--states",
        choices=("fp32", "8bit"),
        default="fp32",
        help="states of AdamW (default: %(default)s)",
    )
    add(
        "--utilisation",
        type=float,
        default=0.5,
        help="part of the peak that is attained (default: %(default)s)",
    )
    add(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="price of a device: adds the cost of 1e9 tokens",
    )
    add(
        "--scale",
        action="store_true",
        help=f"also fewer ranks, from 8 on (from {_SCALE_FROM} ranks on: always)",
    )
    add("--all", action="store_true", help="show what does not fit, too")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")
    add("--html", metavar="FILE", help="write a page with pictures that needs no network")
    return parser


def planned(arguments: Sequence[str]) -> Found:
    """What the command says with these arguments."""
    return _planned_of(_parser().parse_args(arguments))


def training_of(arguments: Sequence[str]) -> Training:
    """How it is trained with these arguments."""
    return _training_of(_parser().parse_args(arguments))


def _planned_of(options: argparse.Namespace) -> Found:
    """Plans.

    Raises:
        ConfigError: There is no such model, or it cannot be run on fake tensors;
            or an option makes no sense.
    """
    counts = (
        options.ranks,
        options.per_node,
        options.sequence,
        options.microbatch,
        options.microbatches,
    )
    cards = options.per_node if options.cards is None else options.cards
    if min(*counts, cards) < 1 or not 0 < options.utilisation <= 1 or options.network <= 0:
        raise ConfigError(
            "A number of the command line is too small or too large.",
            got=" ".join(
                f"{name}={value}"
                for name, value in vars(options).items()
                if isinstance(value, int | float)
            ),
            fix="counts of at least 1, a utilisation above 0 and at most 1, a network above 0",
        )
    if options.ranks > options.per_node and options.ranks % options.per_node:
        raise ConfigError(
            "Nodes are not full.",
            ranks=options.ranks,
            per_node=options.per_node,
            fix=f"--ranks {options.ranks // options.per_node * options.per_node}",
        )
    training = _training_of(options)
    model = model_of(options.model, options.sequence, options.microbatch)
    notes, compute = [], [Compute(0, 0.0), None]
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
    rows = configurations(model, training, compute, shapes_of(options.ranks, options.per_node))
    is_scaled = options.scale or options.ranks >= _SCALE_FROM
    scaled = scale(model, training, compute, rank_counts(options.ranks)) if is_scaled else []
    numel = sum(parameter.numel() for parameter in model.module.parameters())
    title = (
        f"{options.model}: {numel / 1e9:,.2f} B parameters on {options.ranks:,} x "
        f"{options.device}, {options.precision}"
    )
    notes.append(
        f"a device has {_gb(training.machine.device.memory)} GB, of which {_gb(training.reserved)} "
        f"GB are left to others; {options.microbatches} x {model.tokens:,} tokens a rank and "
        "step; speeds "
        + (f"of {options.links}" if options.links else "of data sheets, of which 0.8 is attained")
    )
    pasted = (
        program_of(rows[0], model, training),
        deepspeed_of(rows[0], training, options.microbatch),
    )
    return Found(title, notes, training.machine.device.memory, rows, scaled, *pasted)


def _training_of(options: argparse.Namespace) -> Training:
    device = DEVICES[options.device]
    if options.memory:
        device = replace(device, memory=nbytes_of_text(options.memory, "--memory"))
    cards = options.per_node if options.cards is None else options.cards
    measured = LinkSpeeds.read(options.links) if options.links else None
    machine = Machine(
        device, options.per_node, cards * options.network / 8 * 1e9, measured=measured
    )
    host, disk = (
        None if size == "0" else nbytes_of_text(size, name)
        for name, size in (("--host", options.host), ("--disk", options.disk))
    )
    return Training(
        options.ranks,
        machine,
        nbytes_of_text(options.reserve, "--reserve"),
        host,
        disk,
        torch.float32 if options.precision == "fp32" else torch.bfloat16,
        options.states == "8bit",
        options.microbatches,
        options.utilisation,
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f}"


def _shown(rows: Sequence[Configuration], options: argparse.Namespace) -> Sequence[Configuration]:
    return [row for row in rows if row.proposal.fits or options.all] or rows[:1]


def _rows(rows: Sequence[Configuration], options: argparse.Namespace) -> list[tuple[str, ...]]:
    """The table, with its header."""
    usd = options.usd_per_hour
    header = [
        "mesh",
        "placement",
        "elsewhere",
        "recompute",
        "at rest GB",
        "in flight",
        "activations",
        "of device",
    ]
    header += [
        "host GB",
        "disk GB",
        "sent GB",
        "step s",
        "bound by",
        "tokens/s",
        *(["USD/1e9 tokens"] if usd else []),
        "",
    ]
    found = [tuple(header)]
    for row in rows:
        each = row.proposal
        numbers = [
            each.nbytes - each.in_flight,
            each.in_flight,
            row.activations,
            row.nbytes,
            each.host,
            each.disk,
            row.sent,
        ]
        cells = [
            row.mesh_text,
            each.transform,
            each.away,
            "yes" if row.recompute else "",
            *map(_gb, numbers),
        ]
        cells += [
            f"{each.step_s:,.3f}",
            each.bound,
            f"{row.tokens_per_second:,.0f}" if row.tokens else "-",
        ]
        if usd:
            cells.append(f"{row.usd_per_billion_tokens(usd):,.0f}" if row.tokens else "-")
        found.append((*cells, "" if each.fits else "does not fit"))
    return found


def _scale_rows(rows: Sequence[ScaleRow]) -> list[tuple[str, ...]]:
    header = (
        "ranks",
        "sent GB",
        "padding",
        "latency s",
        "step s",
        "of device",
        "best",
        "step s",
        "of device",
        "files",
    )
    found: list[tuple[str, ...]] = [header]
    for row in rows:
        one, best = row.one, row.best
        cells = [
            f"{row.ranks:,}",
            _gb(one.sent),
            f"{row.padding:.1%}",
            f"{one.latency:,.2f}",
            f"{one.proposal.step_s:,.2f}",
        ]
        shape = (
            f"{best.proposal.transform} over {best.mesh_text}"
            if best.proposal.fits
            else "nothing fits"
        )
        cells += [
            _gb(one.nbytes),
            shape,
            f"{best.proposal.step_s:,.2f}",
            _gb(best.nbytes),
            f"{row.files:,}",
        ]
        found.append(tuple(cells))
    return found


def _text(found: Found, options: argparse.Namespace) -> str:
    fits = found.rows[0].proposal.fits
    lines = [found.title, *found.notes, ""]
    lines += [] if fits else ["Nothing fits. Nearest:"]
    lines += table(_rows(_shown(found.rows, options), options), right=range(4, 12))
    if not fits:
        lines += [
            "",
            "fix: more ranks, --host or --disk, a smaller --microbatch or --sequence, "
            "--states 8bit",
        ]
    if found.scale:
        lines += ["", "On more ranks, ZeRO-3 over one axis; and the best mesh:"]
        lines += [
            *table(_scale_rows(found.scale), right=(0, 1, 2, 3, 4, 5, 7, 8, 9)),
            *first_to_bite(found.scale),
        ]
    lines += [
        "",
        "The first row as a program:",
        "",
        found.program,
        "",
        "... and as a config of DeepSpeed:",
        "",
    ]
    lines.append(
        found.deepspeed
        if isinstance(found.deepspeed, str)
        else json.dumps(found.deepspeed, indent=2)
    )
    return "\n".join(lines)


def _data(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "title": found.title,
        "notes": found.notes,
        "configurations": [_numbers(row, options) for row in found.rows],
        "scale": [
            {
                "ranks": row.ranks,
                "one": _numbers(row.one, options),
                "best": _numbers(row.best, options),
                "padding": row.padding,
                "checkpoint_files": row.files,
                "messages_of_a_save": row.messages,
            }
            for row in found.scale
        ],
        "first_to_bite": list(first_to_bite(found.scale)),
        "program": found.program,
        "deepspeed": found.deepspeed,
    }


def _numbers(row: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    each = row.proposal
    priced = (
        {"usd_per_1e9_tokens": row.usd_per_billion_tokens(options.usd_per_hour)}
        if options.usd_per_hour
        else {}
    )
    return {
        "mesh": dict(row.mesh),
        "placement": each.transform,
        "elsewhere": each.away,
        "recompute": row.recompute,
        "fits": each.fits,
        "at_rest_bytes": each.nbytes - each.in_flight,
        "in_flight_bytes": each.in_flight,
        "activations_bytes": row.activations,
        "device_bytes": row.nbytes,
        "host_bytes": each.host,
        "disk_bytes": each.disk,
        "sent_bytes": row.sent,
        "latency_seconds": row.latency,
        "step_seconds": each.step_s,
        "bound_by": each.bound,
        **({"tokens_per_second": row.tokens_per_second, **priced} if row.tokens else {}),
    }
