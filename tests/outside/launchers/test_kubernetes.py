"""What examples/launch asks of Kubernetes and of Kubeflow: each field is known to their schemas, and pods of two run here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.outside.examples.programs import ROOT
from tests.outside.launchers.runs import SIZES, Marked, has_saved, losses, running_in, wait_for

models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="no package kubeflow: pip install 'zero_fn[launchers]'"
)

MODELS = {
    "Service": models.IoK8sApiCoreV1Service,
    "Job": models.IoK8sApiBatchV1Job,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
"""As the projects publish them: generated from their API."""

LAUNCH = ROOT / "examples" / "launch"
ASKED = {asked["kind"]: asked for path in LAUNCH.glob("*.yaml") for asked in yaml.safe_load_all(path.read_text())}
JOB = ASKED["Job"]["spec"]
(CONTAINER,) = JOB["template"]["spec"]["containers"]
(IGNORED,) = [rule["onExitCodes"] for rule in JOB["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def is_known(asked):
    """Whether every field has the name and type of the schema. A model drops what it does not know."""
    try:
        return bool(MODELS[asked["kind"]].from_dict(asked).to_dict() == asked)
    except ValueError:  # pydantic's
        return False


@pytest.mark.parametrize("kind", MODELS)
def test_every_field_is_known_to_the_schemas_and_a_misspelt_one_is_not(kind):
    assert is_known(ASKED[kind])
    text = yaml.safe_dump(ASKED[kind])
    # Users choose the names of resources and labels; the kind chooses the schema.
    keys = list(re.finditer(r"^[ -]*(?!kind|memory)(\w+):", text, re.MULTILINE))
    assert len(keys) > 5
    for key in keys:
        assert not is_known(yaml.safe_load(text[: key.end(1)] + "s" + text[key.end(1) :])), key[1]


def test_the_parts_of_a_job_fit_together():
    service, template = ASKED["Service"], JOB["template"]["spec"]
    name = ASKED["Job"]["metadata"]["name"]
    assert service["spec"] | {"clusterIP": "None", "selector": {"job-name": name}} == service["spec"]
    assert template["subdomain"] == service["metadata"]["name"]
    assert CONTAINER["env"] == [{"name": "MASTER_ADDR", "value": f"{name}-0.{template['subdomain']}"}]
    assert f"--nnodes={JOB['completions']}" in CONTAINER["command"]
    assert JOB["completions"] == JOB["parallelism"]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {each["name"] for each in template["volumes"]}
    assert f"--nproc-per-node={CONTAINER['resources']['limits']['nvidia.com/gpu']}" in CONTAINER["command"]
    assert IGNORED["containerName"] == CONTAINER["name"]


ONE_RANK = [part for part in CONTAINER["command"] if part.startswith(("/", "--save", "--leave"))]
TRAINER = ASKED["TrainJob"]["spec"]["trainer"]
HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"}
WAYS = {
    "torchrun": (CONTAINER["command"], HERE),
    "one rank a pod": ([sys.executable, *ONE_RANK], HERE | {"WORLD_SIZE": "2"}),
    "Kubeflow": (  # what its runtime torch-distributed sets
        TRAINER["command"] + TRAINER["args"],
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "INDEX"}
        | {f"PET_{name}": value for name, value in HERE.items()},
    ),
}
"""The command of a pod, and its variables."""


@dataclass
class Pods:
    """Two pods, as processes of this host: what the files say, but for names of hosts and folders, and sizes."""

    folder: Path
    command: list[str]
    environ: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = [self._pod(str(index), port) for index in range(2)]

    def _pod(self, index, port):
        given = {name: {"INDEX": index, "PORT": port}.get(value, value) for name, value in self.environ.items()}
        given["JOB_COMPLETION_INDEX"] = index
        here = {"--nnodes=4": "--nnodes=2", "--nproc-per-node=8": "--nproc-per-node=1", "=29500": f"={port}"}
        here |= {"/zero_fn/": f"{ROOT}/", "/checkpoints": str(self.folder)}
        line = "\n".join(self.command)
        for told, value in (here | {f"$({name})": value for name, value in given.items()}).items():
            line = line.replace(told, value)
        words = [word for part in line.split("\n") for word in (TORCHRUN if part == "torchrun" else [part])]
        given |= Marked(self.folder).environ | {"HOME": str(self.folder), "GLOO_SOCKET_IFNAME": "lo"}
        command = ["setpriv", "--pdeathsig=KILL", *words, *SIZES, "--steps=40"]
        with (self.folder / f"log{index}").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=given, stdout=log, stderr=log)

    def wait(self):
        """How they ended."""
        return [process.wait(120) for process in self.processes]

    def wait_until_saved(self):
        wait_for(lambda: has_saved(self.folder / "a") or any(each.poll() is not None for each in self.processes), 120)
        assert [process.poll() for process in self.processes] == [None, None], self.said()

    def said(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        assert wait_for(lambda: not running_in(self.folder), 40), running_in(self.folder)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["torchrun", "Kubeflow"])
def test_a_killed_rank_ends_all_pods_and_new_ones_go_on(way, expected, tmp_path):
    with Pods(tmp_path, *WAYS[way]) as pods:
        pods.wait_until_saved()
        children = Path(f"/proc/{pods.processes[1].pid}/task/{pods.processes[1].pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert pods.wait() == [1, 1]
        assert re.search(r"rank +: 1 \(local_rank: 0\)\s+exitcode +: -9", pods.said()), pods.said()
        pods.start()
        assert pods.wait() == [0, 0], pods.said()
    assert losses(tmp_path / "a") == expected[:40]


@pytest.mark.nightly
def test_a_pod_that_is_told_to_leave_has_not_failed(expected, tmp_path):
    with Pods(tmp_path, *WAYS["one rank a pod"]) as pods:
        pods.wait_until_saved()
        pods.processes[1].terminate()  # as Kubernetes does
        assert [[status] for status in pods.wait()] == [IGNORED["values"]] * 2, pods.said()
        assert len(losses(tmp_path / "a")) < 40
        pods.start()
        assert pods.wait() == [0, 0], pods.said()
    assert losses(tmp_path / "a") == expected[:40]
