"""pretrain.py as a job of Slurm: the batch script of examples/launch, on a cluster that is this machine."""

import time

import pytest

import zero_fn as zf
from tests.outside.examples.programs import ROOT
from tests.outside.launchers.runs import Marked, losses, pretrain, until
from tests.outside.launchers.slurm import Cluster, missing

SCRIPT = ROOT / "examples" / "launch" / "slurm.sbatch"
# In place of what the script asks for.
HERE = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


class Job:
    """A run of pretrain.py that Slurm has queued."""

    def __init__(self, slurm, folder, steps, *options):
        self.slurm, self.folder, self.marked = slurm, folder / "runs", Marked(folder)
        self.log = folder / "log"
        asked = ["sbatch", "--parsable", f"--output={self.log}", *HERE, *options, str(SCRIPT)]
        self.number = slurm(*asked, *pretrain(self.folder, steps), **self.marked.environ).strip()

    def reach(self, wanted, seconds=90.0):
        """Waits until the job is in a state, or has ended in another."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", wanted)
        until(lambda: self.slurm.job(self.number)["JobState"] in states, seconds)
        assert self.slurm.job(self.number)["JobState"] == wanted, self.said()

    @property
    def steps(self):
        """Those that checkpoints have."""
        found = zf.checkpoints(self.folder) if self.folder.is_dir() else []
        return len(losses(self.folder)) if any(each.is_complete for each in found) else 0

    def said(self):
        return self.log.read_text()


def test_a_killed_rank_ends_the_job_which_names_it(slurm, tmp_path):
    job = Job(slurm, tmp_path, 100_000)
    job.marked.kill_rank(1, "SLURM_PROCID", job.folder)
    job.reach("FAILED")
    assert "task 1: Killed" in job.said()
    until(lambda: not job.marked.left(), 10)


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, tmp_path):
    job = Job(slurm, tmp_path, 100_000)
    until(lambda: job.steps >= 2)
    slurm("scancel", job.number)
    job.reach("CANCELLED")
    until(lambda: not job.marked.left(), 10)
    assert job.steps > 2


def test_a_job_at_its_time_limit_saves_before_and_is_queued_again(slurm, tmp_path):
    # Slurm looks every half minute: after 30 to 60 s.
    job = Job(slurm, tmp_path, 100_000, "--time=2", "--signal=TERM@60")
    until(lambda: job.steps >= 2)
    job.reach("PENDING")
    assert slurm.job(job.number)["Restarts"] == "1" and job.steps > 2
    assert "told to leave" not in job.said()
    slurm("scancel", job.number)


def test_a_job_that_slurm_signals_saves_and_goes_on_when_it_runs_again(slurm, tmp_path, expected):
    job = Job(slurm, tmp_path, len(expected))
    until(lambda: job.steps >= 2)
    slurm("scancel", "--signal=TERM", job.number)
    job.reach("PENDING")
    done = job.steps
    assert 2 < done < len(expected) and losses(job.folder) == expected[:done]
    until(lambda: not job.marked.left(), 10)
    time.sleep(2)  # a start in the second in which the one before was ended is refused
    slurm("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # else Slurm waits two minutes
    job.reach("COMPLETED")
    assert job.slurm.job(job.number)["Restarts"] == "1"
    assert losses(job.folder) == expected
