"""Prints the tables of docs/guides/sizes.md: what models need, as `python -m zero_fn plan` says.

    python sizes.py                             all tables: half an hour on one core
    python sizes.py --table fastest --only 7B   the rows of one model in the tables of one kind: a minute

It needs transformers, which has the models, and no accelerator. `planned` calls the command in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from zero_fn.__main__ import main as zero_fn

MODELS, RANKS = ("7B", "13B", "30B", "70B", "175B", "8x22B"), (8, 64, 1024)
STAGES = {"DDP": "replicate", "ZeRO-1": "shard_optimizer", "ZeRO-2": "shard_grads", "ZeRO-3": "shard_params"}
NAMES = {"hybrid": "HSDP", "shard_params, shard_grads outer": "hpZ"} | {each: name for name, each in STAGES.items()}
KINDS = {"bf16": "", "bf16, states in 8 bits": "--states 8bit", "fp32": "--precision fp32"}
DEVICES = {  # and the network of their nodes
    "24 GB": "--device rtx4090 --cards 1 --network 100",
    "40 GB": "--device a100-40 --cards 8 --network 200",
    "80 GB": "--device h100 --cards 8 --network 400",
    "141 GB": "--device h200 --cards 8 --network 400",
}
ALONE, ALL = "--host 0 --disk 0", "--host 2TB --disk 8TB"
COLUMNS = dict.fromkeys(STAGES, ALONE) | {"ZeRO-3, host": "--host 2TB --disk 0", "ZeRO-3, host, NVMe": ALL}


@cache
def planned(model: str, ranks: int, options: str) -> dict[str, Any]:
    """What `python -m zero_fn plan` says. Its status is 1 if nothing fits, and the JSON is there all the same."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        zero_fn(["plan", model, "--ranks", str(ranks), *options.split(), "--json"])
    return dict(json.loads(said.getvalue()))


def fastest(kind: str, model: str, ranks: int, devices: Iterable[str] = DEVICES) -> list[str]:
    """The fastest configuration that fits, and tokens per second of a device; of equally fast ones the lowest stage."""
    cells = [f"{model}, {ranks:,}"]
    for device in devices:
        row = planned(model, ranks, f"{DEVICES[device]} {ALL} {KINDS[kind]}")["configurations"][0]
        tiers = [tier for tier in ("host", "disk") if f"on {tier}" in row["elsewhere"]]
        words = [NAMES[row["placement"]], *["R"] * row["recompute"], *tiers, f"{row['tokens_per_second'] / ranks:,.0f}"]
        cells.append(" ".join(words) if row["fits"] else "-")
    return cells


def of_stage(stage: str, model: str, ranks: int, options: str) -> dict[str, Any]:
    """A stage over one axis, with activations recomputed. A single rank has one stage, which is all of them."""
    rows = [row for row in planned(model, ranks, options)["configurations"] if row["recompute"]]
    return dict(next(row for row in rows if ranks == 1 or row["placement"] == STAGES[stage]))


def at_rest(kind: str, model: str, stage: str) -> list[str]:
    """GB of a rank at rest, and at the worst moment of a step, without activations."""
    rows = [of_stage(stage, model, ranks, f"{ALONE} {KINDS[kind]}") for ranks in RANKS]
    both = [(row["at_rest_bytes"] / 1e9, row["in_flight_bytes"] / 1e9) for row in rows]
    return [model, stage, *(f"{rests:,.1f} ({rests + flies:,.1f})" for rests, flies in both)]


def sent(model: str, stage: str) -> list[str]:
    """GB that each of 64 ranks sends in a step, and the seconds of it at 50 and 300 GB/s: in bf16, then in fp32."""
    bf16, fp32 = (of_stage(stage, model, 64, f"{ALONE} {KINDS[kind]}")["sent_bytes"] / 1e9 for kind in ("bf16", "fp32"))
    cells = [f"{bf16:,.1f}", f"{bf16 / 50:.1f} s", f"{bf16 / 300:.2f} s", f"{fp32:,.1f}", f"{fp32 / 50:.1f} s"]
    return [model, stage, *cells]


def largest(ranks: int, columns: Iterable[str] = COLUMNS) -> list[str]:
    """Billions of parameters of the largest model of the shape of GPT-3. What fits a column fits the next one, too."""
    layers, cell, cells = 1, "-", [f"{ranks:,}"]  # a layer alone is not recomputed
    with tempfile.TemporaryDirectory() as folder:
        for column in columns:
            step, grows = 1, True  # it doubles until a model is too large, then it halves
            options = f"--sequence 2048 {DEVICES['80 GB']} {COLUMNS[column]}"
            while step:
                n = layers + step
                shape = {"model_type": "gpt2", "n_layer": n, "n_embd": 128 * n, "n_head": n, "n_positions": 4096}
                Path(folder, "config.json").write_text(json.dumps(shape))
                planned.cache_clear()  # the name of the file stays
                if of_stage(column.partition(",")[0], folder, ranks, options)["fits"]:
                    layers, cell = n, planned(folder, ranks, options)["title"].removeprefix(f"{folder}: ").split()[0]
                grows = grows and layers == n
                step = step * 2 if grows else step // 2
            cells.append(cell)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the tables of docs/guides/sizes.md.")
    parser.add_argument("--only", action="append", choices=MODELS, help="a model; may be given several times")
    parser.add_argument("--table", choices=("fastest", "at-rest", "sent", "largest"), help="the tables of one kind")
    options = parser.parse_args()
    models = options.only or MODELS
    staged: list[Iterable[Any]] = [[model for model in models if model not in ("30B", "8x22B")], STAGES]
    counts = [(kind, RANKS if kind == "bf16" else RANKS[:2]) for kind in KINDS]  # 1,024 take long
    tables: list[tuple[str, str, Callable[..., list[str]], list[Iterable[Any]]]] = [
        *(("fastest", " | ".join([kind, *DEVICES]), partial(fastest, kind), [models, ranks]) for kind, ranks in counts),
        ("at-rest", "bf16, GB | | 8 | 64 | 1,024 ranks", partial(at_rest, "bf16"), staged),
        ("at-rest", "fp32, GB | | 8 | 64 | 1,024 ranks", partial(at_rest, "fp32"), staged),
        ("sent", "64 ranks | | bf16: GB | at 50 GB/s | at 300 GB/s | fp32: GB | at 50 GB/s", sent, staged),
        ("largest", " | ".join(["devices", *COLUMNS]), largest, [(1, *RANKS)]),
    ]
    for name, header, of, keys in tables:
        if options.table in (None, name):
            print(f"\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
            for key in product(*keys):
                print(f"| {' | '.join(of(*key))} |", flush=True)


if __name__ == "__main__":
    main()
