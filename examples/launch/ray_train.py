"""Runs pretrain.py, as it stands, on the workers of Ray Train; a lost worker costs the steps since the last checkpoint.

    python ray_train.py --workers 2 -- --save runs/a --steps 400        on this host; after -- the options of pretrain.py
    RAY_ADDRESS=auto python ray_train.py --workers 16 --storage /shared/ray -- --save /shared/runs/a        on a cluster

Ray makes the process group, and starts all workers again if one is lost. Losses are those of as many ranks of torchrun.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def import_zero_fn() -> None:
    """From then on groups of gloo have one thread each."""
    import zero_fn  # noqa: F401


class Backend(TorchConfig().backend_cls):  # type: ignore[misc]  # Ray's, whose class is not public
    """Ray's process group, made after zero_fn was imported: `run` would come too late, for the group is there by then."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(import_zero_fn)
        super().on_start(worker_group, backend_config)


class OneThread(TorchConfig):  # type: ignore[misc]
    backend_cls = Backend


def run(given: dict[str, Any]) -> None:
    """Runs the program on a worker, in the folder of the driver: Ray starts workers in others."""
    os.chdir(given["folder"])
    sys.argv = given["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failures", type=int, default=3, help="how often workers are started again; -1: always")
    parser.add_argument("--storage", help="where Ray keeps its own notes; a folder that all hosts share")
    parser.add_argument("--program", default=str(Path(__file__).parents[1] / "pretrain.py"))
    parser.add_argument("options", nargs="*", help="of the program, after --")
    options = parser.parse_args()
    local: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):  # a cluster of this host alone, which ends with this program
        cpus = max(options.workers, os.cpu_count() or 1)
        local = {"address": "local", "num_cpus": cpus, "object_store_memory": 2**27, "include_dashboard": False}
    ray.init(**local)
    has_gpus = ray.cluster_resources().get("GPU", 0) >= options.workers
    try:
        TorchTrainer(
            run,
            train_loop_config={"folder": os.getcwd(), "arguments": [options.program, *options.options]},
            torch_config=OneThread(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
            scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=has_gpus),
            run_config=RunConfig(
                storage_path=options.storage, failure_config=FailureConfig(max_failures=options.failures)
            ),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
