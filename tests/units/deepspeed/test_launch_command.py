"""`python -m zero_fn launch`: what each option of the deepspeed launcher becomes, and a run of it."""

import os
import shlex
import socket
import subprocess
import sys

import pytest

from zero_fn.deepspeed import launch_command
from zero_fn.deepspeed.launch_command import main, options_of, this_host, torchrun_lines
from zero_fn.errors import ConfigError

TWO = "# name, devices\nalpha slots=2\n\n  beta   slots=4 # fast\n"
RUN = [sys.executable, "-m", "torch.distributed.run"]
LOCAL_RANK = "--local_rank=${local_rank}"


def lines(words, hostfile=None, devices=4):
    """The lines without the interpreter, the launcher and the script's --local_rank."""
    found = torchrun_lines(options_of([*shlex.split(words), "train.py"]), hostfile, devices)
    assert all([*line][-2:] == ["train.py", LOCAL_RANK] for line in found.values())
    return {host: " ".join(line[:-2]).replace(" ".join(RUN), "torchrun") for host, line in found.items()}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "torchrun --nproc-per-node 4"),
        ("--num_gpus 4 --num_nodes 1", "torchrun --nproc-per-node 4"),
        ("--num_gpus -1 --no_ssh_check --log_level info", "torchrun --nproc-per-node 4"),
        ("--num_accelerators 2", "env CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2"),
        ("--include localhost:3,1", "env CUDA_VISIBLE_DEVICES=1,3 torchrun --nproc-per-node 2"),
        ("-i localhost", "torchrun --nproc-per-node 4"),
        ("-e localhost:0", "env CUDA_VISIBLE_DEVICES=1,2,3 torchrun --nproc-per-node 3"),
        ("--master_port 7", "torchrun --nproc-per-node 4 --master-addr localhost --master-port 7"),
        ("--master_addr 10.0.0.1", "torchrun --nproc-per-node 4 --master-addr 10.0.0.1 --master-port 29500"),
        ("--enable_each_rank_log logs", "torchrun --nproc-per-node 4 --log-dir logs --redirects 3"),
        ("--enable_each_rank_log None", "torchrun --nproc-per-node 4"),
        ("--module", "torchrun --nproc-per-node 4 --module"),
        ("--no_python", "torchrun --nproc-per-node 4 --no-python"),
    ],
)
def test_options_for_this_host(words, line):
    assert lines(words) == {"localhost": line}


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("", {"alpha": "0,1", "beta": "0,1,2,3"}),
        ("--num_nodes 1", {"alpha": "0,1"}),
        ("--num_gpus 2", {"alpha": "0,1", "beta": "0,1"}),
        ("--num_gpus 1 --num_nodes 2", {"alpha": "0", "beta": "0"}),
        ("--include beta:0,2@alpha", {"alpha": "0,1", "beta": "0,2"}),
        ("--include beta:3@beta:1", {"beta": "1,3"}),
        ("--exclude alpha", {"beta": "0,1,2,3"}),
        ("--exclude beta:0,3@alpha:1", {"alpha": "0", "beta": "1,2"}),
        ("--exclude alpha:0,1", {"beta": "0,1,2,3"}),
    ],
)
def test_devices_of_a_hostfile(words, devices):
    expected = {}
    for rank, (host, numbers) in enumerate(devices.items()):
        hosts = f" --nnodes 2 --node-rank {rank} --master-addr alpha --master-port 29500" if len(devices) == 2 else ""
        count = len(numbers.split(","))
        expected[host] = f"env CUDA_VISIBLE_DEVICES={numbers} torchrun --nproc-per-node {count}{hosts}"
    assert lines(words, TWO) == expected


@pytest.mark.parametrize(
    ("words", "hostfile"),
    [
        ("--include localhost:4", None),
        ("--include localhost:1-2", None),
        ("--include localhost:", None),
        ("--exclude gamma", TWO),
        ("--exclude alpha@beta", TWO),
        ("--num_gpus 3", TWO),
        ("--num_gpus 5", None),
        ("--num_nodes 3", TWO),
        ("--num_nodes 2", None),
        ("--include alpha --exclude beta", TWO),
        ("--include alpha --num_gpus 1", TWO),
        ("", "alpha\n"),
        ("", "alpha slots=2\nalpha slots=2\n"),
        ("", "# nothing\n"),
        *((f"{name} 1", None) for name in ("--launcher", "--ssh_port", "--min_elastic_nodes", "--bind_core_list")),
        *((name, None) for name in ("--autotuning=run", "--save_pid", "--bind_cores_to_rank", "--elastic_training")),
    ],
)
def test_what_cannot_be_followed_is_refused(words, hostfile):
    with pytest.raises(ConfigError):
        lines(words, hostfile)


def test_a_refusal_is_told_and_has_a_status(capsys):
    assert main(["--launcher", "slurm", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: torchrun has nothing that does what --launcher does.")


def test_this_host_is_known_by_its_rank_as_the_only_one_or_by_its_name():
    two = {"alpha": ["a"], socket.gethostname(): ["b"]}
    assert this_host(options_of(["x.py"]), two) == socket.gethostname()
    assert this_host(options_of(["--no_ssh", "--node_rank", "0", "x.py"]), two) == "alpha"
    assert this_host(options_of(["x.py"]), {"alpha": ["a"]}) == "alpha"
    with pytest.raises(ConfigError, match="none of the hosts"):
        this_host(options_of(["--node_rank", "2", "x.py"]), two)


@pytest.mark.parametrize(("words", "count"), [([], 2), (["-q"], 1), (["--log_level", "error"], 1), (["--no_ssh"], 1)])
def test_lines_of_other_hosts_are_printed_unless_they_start_themselves(words, count, tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text(TWO)
    became = []
    monkeypatch.setattr(launch_command.os, "execvp", lambda file, words: became.append(words))
    main(["-H", f"{tmp_path / 'hosts'}", "--node_rank", "1", *words, "train.py", "two words"])
    said = capsys.readouterr().err.splitlines()
    shown = {line.split()[3].rstrip(":"): shlex.split(line.partition(": on ")[2].partition(": ")[2]) for line in said}
    assert len(said) == count and [*became[0]][-3:] == ["train.py", LOCAL_RANK, "two words"]
    assert shown.get("beta", became[0]) == became[0] and ("alpha" in shown) == ("--no_ssh" not in words)


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
    command = [
        sys.executable,
        "-m",
        "zero_fn",
        "launch",
        "-H",
        f"{hosts}",
        "--exclude",
        "anywhere:1",
        f"{script}",
        *odd,
    ]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "7"}
    good = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=True)
    expected = [f"{rank} 2 {rank} 0,2 {[f'--local_rank={rank}', *odd]}" for rank in (0, 1)]
    assert sorted(good.stdout.splitlines()) == expected, good
    words = ["--num_gpus", "2", "--no_local_rank", f"{script}", "--fail"]
    bad = subprocess.run([*command[:4], *words], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 1 and bad.stderr.startswith("zero_fn launch: on localhost: "), bad
    assert set(bad.stdout.splitlines()) <= {f"{rank} 2 {rank} None ['--fail']" for rank in (0, 1)} and bad.stdout
