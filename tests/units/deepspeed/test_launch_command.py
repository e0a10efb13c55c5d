"""`python -m zero_fn launch`: what each option of the deepspeed launcher becomes, and a run of it."""

import os
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.messages import assert_says, refused
from zero_fn.deepspeed import launch_command
from zero_fn.deepspeed.launch_command import main, options_of, this_host, torchrun_lines
from zero_fn.errors import ConfigError

LAUNCHED = tomllib.loads(Path(__file__).with_name("launched.toml").read_text())
RUN = [sys.executable, "-m", "torch.distributed.run"]
LOCAL_RANK = "--local_rank=${local_rank}"


def lines(words, hostfile=None, devices=4):
    """The lines without the interpreter, the launcher and the script's --local_rank."""
    found = torchrun_lines(options_of([*shlex.split(words), "train.py"]), hostfile, devices)
    assert all([*line][-2:] == ["train.py", LOCAL_RANK] for line in found.values())
    return {host: " ".join(line[:-2]).replace(" ".join(RUN), "torchrun") for host, line in found.items()}


@pytest.mark.parametrize("words", LAUNCHED["here"])
def test_options_for_this_host(words):
    assert lines(words) == {"localhost": LAUNCHED["here"][words]}


@pytest.mark.parametrize("words", LAUNCHED["devices"])
def test_devices_of_a_hostfile(words):
    devices, expected = LAUNCHED["devices"][words], {}
    for rank, (host, numbers) in enumerate(devices.items()):
        hosts = f" --nnodes 2 --node-rank {rank} --master-addr alpha --master-port 29500" if len(devices) == 2 else ""
        count = len(numbers.split(","))
        expected[host] = f"env CUDA_VISIBLE_DEVICES={numbers} torchrun --nproc-per-node {count}{hosts}"
    assert lines(words, LAUNCHED["hostfile"]) == expected


@pytest.mark.parametrize("row", LAUNCHED["refused"], ids=lambda row: row["words"])
def test_what_cannot_be_followed_is_refused(row):
    with pytest.raises(ConfigError, match=row.get("says")) as caught:
        lines(row["words"], row.get("hostfile"))
    if "snapshot" in row:
        assert_says(row["snapshot"], caught.value)


def test_a_refusal_is_told_and_has_a_status(capsys):
    assert main(["--launcher", "slurm", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: torchrun has nothing that does what --launcher does.")


def test_this_host_is_known_by_its_rank_as_the_only_one_or_by_its_name():
    two = {"alpha": ["a"], socket.gethostname(): ["b"]}
    assert this_host(options_of(["x.py"]), two) == socket.gethostname()
    assert this_host(options_of(["--no_ssh", "--node_rank", "0", "x.py"]), two) == "alpha"
    assert this_host(options_of(["x.py"]), {"alpha": ["a"]}) == "alpha"
    with pytest.raises(ConfigError):
        this_host(options_of(["--node_rank", "2", "x.py"]), two)
    with refused("launch_on_other_hosts"):
        this_host(options_of(["x.py"]), {"worker-0": ["torchrun", "--node-rank", "0"], "worker-1": ["torchrun"]})


@pytest.mark.parametrize(("words", "count"), [([], 2), (["-q"], 1), (["--log_level", "error"], 1), (["--no_ssh"], 1)])
def test_lines_of_other_hosts_are_printed_unless_they_start_themselves(words, count, tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text(LAUNCHED["hostfile"])
    became = []
    monkeypatch.setattr(launch_command.os, "execvp", lambda file, words: became.append(words))
    main(["-H", f"{tmp_path / 'hosts'}", "--node_rank", "1", *words, "train.py", "two words"])
    said = capsys.readouterr().err.splitlines()
    shown = {line.split()[3].rstrip(":"): shlex.split(line.partition(": on ")[2].partition(": ")[2]) for line in said}
    assert len(said) == count and [*became[0]][-3:] == ["train.py", LOCAL_RANK, "two words"]
    assert shown.get("beta", became[0]) == became[0] and ("alpha" in shown) == ("--no_ssh" not in words)


@pytest.mark.nightly
def test_a_run_has_ranks_devices_arguments_and_a_status(tmp_path):
    script, hosts = tmp_path / "script.py", tmp_path / "hosts"
    hosts.write_text("anywhere slots=3\n")
    script.write_text(
        "import os, sys\n"
        "names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES'\n"
        "said = ' '.join(map(str, [*map(os.environ.get, names), sys.argv[1:]]))\n"
        "sys.stdout.write(said + '\\n')  # at once: ranks share the stream\n"
        "sys.exit('--fail' in sys.argv)\n"
    )
    odd = ["--flag", "$x $$ ${local_rank}", "--", "--num_gpus"]
    launch = [sys.executable, "-m", "zero_fn", "launch"]
    command = [*launch, "-H", f"{hosts}", "--exclude", "anywhere:1", f"{script}", *odd]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "7"}
    good = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=True)
    expected = [f"{rank} 2 {rank} 0,2 {[f'--local_rank={rank}', *odd]}" for rank in (0, 1)]
    assert sorted(good.stdout.splitlines()) == expected, good
    words = ["--num_gpus", "2", "--no_local_rank", f"{script}", "--fail"]
    bad = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1 and bad.stderr.startswith("zero_fn launch: on localhost: "), bad
    assert set(bad.stdout.splitlines()) <= {f"{rank} 2 {rank} None ['--fail']" for rank in (0, 1)} and bad.stdout
