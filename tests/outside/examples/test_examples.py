"""The files of examples/, each run as a user runs it but smaller; and the demo. Benchmarks: `test_benchmarks.py`."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zero_fn as zf
from tests.outside.examples.programs import ALONE, ROOT, TORCHRUN, run_alone, said_on_ranks
from tests.support.versions import IS_2_11

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALL_GPT = "--layers 2 --dim 32 --heads 2 --seq 16"
PRETRAIN = f"pretrain.py {SMALL_GPT} --batch 12 --save-every 2"


def _said(ranks, number, folder, line):
    return said_on_ranks(ranks(number, deadline_s=120), folder, line)


def _losses(said):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


def test_each_example_is_short_needs_no_file_beside_it_and_is_run_by_a_test():
    names = ("examples", "finetune_hf", "generation", "sizes")
    tested = "".join(Path(__file__).with_name(f"test_{name}.py").read_text() for name in names)
    assert len(EXAMPLES) == 14
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert path.name in tested
        assert len(text.splitlines()) <= 130, path
        for other in EXAMPLES:
            assert not re.search(rf"^(import|from) {other.stem}\b", text, re.MULTILINE), path


# Losses of pretrain.py are compared with those of a run that nothing has interrupted.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of that run, of 20 steps by one rank at stage 3, in which only the last checkpoints are left."""
    folder = tmp_path_factory.mktemp("whole")
    name, *arguments = f"{PRETRAIN} --steps 20 --save {folder}".split()
    said = run_alone(folder, ROOT / "examples" / name, *arguments, environ=ALONE)
    assert said.ended == 0, said
    return folder


def _saved(folder):
    return zf.load(folder, only="extra")["losses"]


def test_a_run_goes_on_at_other_ranks_and_another_stage(ranks, whole, tmp_path):
    _said(ranks, 3, tmp_path, f"{PRETRAIN} --steps 4 --save runs")
    before = _saved(tmp_path / "runs")
    said = _said(ranks, 2, tmp_path, f"{PRETRAIN} --steps 6 --save runs --stage 1")
    assert "step 5" in said and "step 0" not in said
    assert "step" not in _said(ranks, 2, tmp_path, f"{PRETRAIN} --steps 6 --save runs"), "all steps were taken"
    assert _saved(tmp_path / "runs")[:4] == before
    assert _saved(tmp_path / "runs") == pytest.approx(_saved(whole)[:6], abs=1e-4)


def test_a_run_that_goes_on_and_recomputes_is_the_whole_one_to_the_bit(ranks, tmp_path):
    for options in ("6 --save whole", "4 --save resumed --recompute 1", "6 --save resumed --recompute 1"):
        _said(ranks, 2, tmp_path, f"{PRETRAIN} --precision bf16 --steps {options}")
    assert _saved(tmp_path / "resumed") == _saved(tmp_path / "whole")


def test_a_file_of_tokens_has_two_bytes_for_each(ranks, tmp_path):
    """A model of 299 kinds has no row for the last of them, which no single byte would be."""
    (tmp_path / "tokens").write_bytes((299).to_bytes(2, sys.byteorder) * 100)
    line = f"{PRETRAIN} --steps 4 --save runs --text tokens"
    _said(ranks, 2, tmp_path, f"{line} --vocab 300")
    losses = _saved(tmp_path / "runs")
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(Exception, match="index out of range"):
        _said(ranks, 3, tmp_path, f"{line} --vocab 299 --save other")  # who raises is started anew: two have libraries


def test_metrics_of_a_run_that_goes_on_are_in_one_file(ranks, tmp_path):
    for steps in (10, 20):
        _said(ranks, 2, tmp_path, f"{PRETRAIN} --steps {steps} --save runs --log-to csv:log.csv")
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [10, 20]
    assert float(rows[1]["zero_fn/loss"]) == pytest.approx(_saved(tmp_path / "runs")[19])


@pytest.mark.nightly
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(whole, tmp_path):
    """Under torchrun, which starts all ranks again."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = f"2 --max-restarts=1 {ROOT}/examples/{PRETRAIN} --steps 20 --save runs"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*TORCHRUN, *line.split()], cwd=tmp_path, env=environ, **pipes)
    saved = tmp_path / "runs" / "step-000004" / "manifest.json"
    while not saved.exists() and process.poll() is None:
        time.sleep(0.002)  # the rank is killed in the midst of the steps that follow
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert "exitcode: -9" in told, told
    assert _saved(tmp_path / "runs") == pytest.approx(_saved(whole), abs=1e-4)


def test_one_gpu_and_its_host_train_the_same_wherever_states_rest(tmp_path):
    said = [
        run_alone(tmp_path, ROOT / "examples" / "one_gpu_and_host.py", *f"{SMALL_GPT} --steps 3 --rest".split(), rest)
        for rest in ("nothing", "states", "all", "all, in turns")
    ]
    assert [each.ended for each in said] == [0] * 4, said
    assert len(_losses(said[0].out)) == 3
    assert all(_losses(each.out) == _losses(said[0].out) for each in said)


def test_a_model_trains_with_everything_on_a_disk(ranks, tmp_path):
    said = _said(ranks, 2, tmp_path, "nvme.py --layers 3 --dim 64 --steps 3 --log-to jsonl:log.jsonl")
    assert "in nvme('.')" in said
    assert len(_losses(said)) == 3
    assert _losses(said) == sorted(_losses(said), reverse=True)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["zero_fn/tier_written_bytes_total/nvme"] > 3 * 64 * 64 for row in rows)


def test_two_axes_train_the_same_in_each_composition(ranks, tmp_path):
    names = ["hsdp", "hpz", "zero1-zero3", "zero3"]
    said = [_said(ranks, 4, tmp_path, f"two_axes.py --layers 2 --dim 16 --steps 2 --compose {name}") for name in names]
    assert len(_losses(said[0])) == 2
    for other in said[1:]:
        assert _losses(other) == pytest.approx(_losses(said[0]), abs=1e-5)


def test_islands_that_meet_every_few_steps_learn_as_one_does_for_few_bytes(ranks, tmp_path):
    line = "outer_steps.py --layers 1 --dim 32 --heads 2 --seq 16 --steps 40"
    apart, together = (_said(ranks, 4, tmp_path, f"{line} --apart {steps}") for steps in (8, 0))
    assert _losses(apart)[0] == _losses(together)[0]
    assert _losses(apart)[-1] == pytest.approx(_losses(together)[-1], rel=0.05)
    sent = [{axis: int(n) for axis, n in re.findall(r"'(\w+)': (\d+)", said)} for said in (apart, together)]
    assert sent[0]["dp"] == sent[1]["dp"]
    assert sent[0]["islands"] < sent[1]["islands"] / (8 * 5)  # an eighth of the steps, some 5 bits of 32


@pytest.mark.parametrize(
    "schedule",
    [
        "Interleaved1F1B",
        pytest.param("1F1B" if IS_2_11 else "ZBVZeroBubble", marks=pytest.mark.nightly),
    ],
)
def test_three_axes_train_as_one_process_does(ranks, tmp_path, schedule):
    sizes = "--layers 4 --dim 16 --heads 2 --steps 3"  # 2.11 sends from a rank to itself under ZBV
    alone = _losses(_said(ranks, 1, tmp_path, f"train_3d.py {sizes} --pp 1 --tp 1"))
    several = _losses(_said(ranks, 4, tmp_path, f"train_3d.py {sizes} --pp 2 --tp 2 --schedule {schedule}"))
    assert len(alone) == 3
    assert several == pytest.approx(alone, abs=1e-4)


@pytest.mark.nightly
def test_three_axes_that_recompute_go_on_at_other_sizes(ranks, tmp_path):
    options = "--layers 4 --dim 16 --heads 2 --precision bf16 --recompute 1"
    line = f"train_3d.py {options} --save_every 2 --steps"
    begun = _losses(_said(ranks, 4, tmp_path, f"{line} 2 --save runs --schedule Interleaved1F1B"))
    resumed = _losses(_said(ranks, 2, tmp_path, f"{line} 4 --save runs --pp 2 --tp 1 --stage 1"))
    whole = _losses(_said(ranks, 1, tmp_path, f"{line} 4 --save whole --pp 1 --tp 1"))
    assert begun + resumed == pytest.approx(whole, abs=2e-2)
    kept = [zf.load(tmp_path / name, only="extra")["step"] for name in ("runs", "whole")]
    assert (len(begun), len(whole), kept) == (2, 4, [4, 4])


@pytest.mark.parametrize(
    "line",
    [
        "moe.py --ep 2 --experts 6 --top 1 --tokens 8",
        "moe_capacity.py --ep 2 --top 1 --capacity_factor 0.5 --residual 1",
        "mixtral_experts.py --ep 2",
    ],
)
def test_experts_train(ranks, tmp_path, line):
    """As in one process: `tests/axes/test_experts.py`, with the same files."""
    if "mixtral" in line:
        from tests.outside.integrations.worlds import import_all  # skips without the extra

        ranks(2, deadline_s=240).run(import_all)
    assert len(_losses(_said(ranks, 2, tmp_path, f"{line} --steps 2"))) == 2


def test_a_deepspeed_config_is_followed_and_taken_up_again(ranks, tmp_path):
    line = "from_deepspeed_json.py --layers 2 --dim 16"
    begun = _said(ranks, 2, tmp_path, f"{line} --steps 2 --save runs")
    assert "zero_optimization.stage" in begun
    resumed = _said(ranks, 2, tmp_path, f"{line} --steps 4 --save runs")
    assert _losses(begun) + _losses(resumed) == _losses(_said(ranks, 2, tmp_path, f"{line} --steps 4"))


def test_what_was_pretrained_writes_text(whole, tmp_path):
    said = run_alone(tmp_path, ROOT / "examples" / "generate.py", *f"{SMALL_GPT} --weights {whole} --tokens 3".split())
    assert said.ended == 0, said
    assert said.out.count("Once upon a time") == 2


UNDER_A_LIMIT = """
import re, resource, runpy, sys
import torch, zero_fn
from pathlib import Path

taken = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (taken + 110 * 2**20, resource.RLIM_INFINITY))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux counts it")
def test_a_model_larger_than_memory_writes_text(tmp_path):
    """152 MB of parameters under a limit of 115 MB for all else; without a disk it does not even begin."""
    program = f"{ROOT}/examples/generate.py --layers 12 --dim 512 --tokens 2 --rows 1"
    for path, begins in ((f"--path {tmp_path}", True), ("", False)):
        command = [sys.executable, "-c", UNDER_A_LIMIT, *program.split(), *path.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert (done.returncode == 0) == begins, done.stdout + done.stderr
        assert ("Once upon a time" in done.stdout) == begins


# The demo


def _demo(folder, line):
    said = run_alone(folder, ROOT / ".ci" / "demo.py", *line.split())
    return said.ended, said.out


@pytest.mark.nightly  # .ci/run runs the demo
def test_the_demo_compares_with_ddp_and_draws(tmp_path):
    sizes = "--layers 1 --dim 16 --heads 2 --seq 16 --batch 4 --steps 3 --compare-steps 2 --evaluate-every 2 --sample 3"
    ended, out = _demo(tmp_path, f"{sizes} --text {ROOT / 'docs' / 'how'} --out {tmp_path}")
    assert ended == 0, out
    assert re.search(r"the losses of stage 3 and plain DDP over 2 steps differ by at most \S+: they agree", out)
    assert re.search(r"sent per rank and step +(\S+ MB) +\1 +not counted", out), "bytes are not those of the formula"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes.png", "loss.png"]


def test_the_demo_refuses_what_cannot_be(tmp_path):
    for given, said in (
        ("--batch 5", "--batch 5 sequences cannot be shared equally by 2 ranks"),
        ("--heads 5", "--dim 176 is no multiple of --heads 5"),
        ("--lr 0", "--lr must be above 0"),
        ("--text /nowhere", "no such file or folder: /nowhere"),
    ):
        ended, out = _demo(tmp_path, f"{given} --out {tmp_path}")
        assert ended == 2
        assert said in out
