"""`python -m zero_fn deepspeed check`: what becomes of a DeepSpeed config, what is refused,
and what a model needs by it.

    python -m zero_fn deepspeed check ds_config.json --ranks 8
    python -m zero_fn deepspeed check ds_config.json --model config.json --ranks 8 \\
        --auto optimizer.params.lr=1e-5

No process group is needed, and no accelerator: the model is on `meta`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from zero_fn.deepspeed.auto import DEFAULTS, left_to, values_of
from zero_fn.deepspeed.entries import config_of, filled, outcomes_text
from zero_fn.deepspeed.placement import made_by
from zero_fn.deepspeed.settings import Settings, settings_of
from zero_fn.deepspeed.tensor_parallel import cut_by_its_plan, split
from zero_fn.errors import ZeroError
from zero_fn.inspect.planned_bytes import Plan, plan
from zero_fn.planning.configurations import pretended
from zero_fn.planning.models import model_of
from zero_fn.transforms.offload import offloaded
from zero_fn.values.home import Home
from zero_fn.values.tiers import IN_MEMORY

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Prints the table of a config, and the plan of a model.

    Returns 0; 1 with the error if the config would be refused.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero_fn deepspeed", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("verb", choices=["check"])
    parser.add_argument("config", help="a DeepSpeed config: the path of a JSON file, or JSON")
    parser.add_argument(
        "--ranks", type=int, default=8, help="processes in all (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        help="config.json of Hugging Face, or its folder; module:function; or a size, as of plan",
    )
    parser.add_argument(
        "--auto",
        nargs="*",
        default=[],
        metavar="ENTRY=VALUE",
        help='values for "auto" and what is missing; default: those of TrainingArguments',
    )
    options = parser.parse_args(arguments)
    try:
        config, auto = config_of(options.config), {}
        for each in options.auto:
            path, _, text = each.replace("bfloat16.", "bf16.").partition("=")
            auto[path] = text
            with suppress(ValueError):
                auto[path] = json.loads(text)
        config = filled(config, auto)
        taken = left_to(values_of(DEFAULTS, config), config)
        settings = settings_of(config, options.ranks, taken, others={})
        print(outcomes_text(settings.outcomes))
        for path, value in taken.items():
            print(f"taken for auto: {path} = {value}")
        if options.model:
            print(f"\n{_plan_of(settings, options.model, options.ranks)}")
    except ZeroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _plan_of(settings: Settings, model: str, ranks: int) -> Plan:
    """What a rank holds and sends.

    The fused kernel of an optimizer knows no `meta`; it has the states of the other.
    """
    module: Any = model_of(model, sequence=8, microbatch=1).module
    tiers = settings.sharding.tiers
    with pretended(ranks):
        mesh, _, tensor = split(
            init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",)), settings.cuts, {}
        )
        module = module if tensor is None else cut_by_its_plan(module, tensor)
        in_memory = replace(settings, sharding=replace(settings.sharding, tiers=IN_MEMORY))
        placed = offloaded(made_by(in_memory, mesh, module), Home(tiers=tiers), reserves=False)
        if settings.stock is None:
            return plan(placed, backwards=settings.accumulation_steps)
        options = {name: value for name, value in settings.stock.options.items() if name != "fused"}
        return plan(
            placed,
            replace(settings.stock, options=options)(placed),
            backwards=settings.accumulation_steps,
        )
