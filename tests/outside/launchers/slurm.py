"""A cluster of Slurm that is this machine: its daemons, with ports and files of their own."""

import os
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack

from tests.outside.launchers.runs import until

__all__ = ["Cluster", "missing"]

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8
"""
# All daemons and jobs are in a namespace of processes, which ends with its first, and that with this process.
_OURS = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
_DAEMONS = """
munged --force --foreground --key-file={0}/munge.key --socket={0}/munge.socket --pid-file={0}/munge.pid \
    --log-file={0}/munge.log --seed-file={0}/munge.seed &
until [ -S {0}/munge.socket ]; do sleep 0.05; done
slurmctld -D -c &
slurmd -D &
wait
"""


def missing():
    """Why there can be no cluster."""
    if lacking := [name for name in ("slurmctld", "slurmd", "munged", "setpriv") if shutil.which(name) is None]:
        return f"no Slurm: no {', '.join(lacking)}; examples/launch/install-debian.sh"
    return "no Slurm without root" if os.geteuid() else None


class Cluster:
    """Ends with the process that made it, at the latest."""

    def __init__(self, folder):
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        with ExitStack() as bound:
            ports = [bound.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
        names = {"host": host, "user": "root", "folder": folder, "cpus": os.cpu_count()}
        conf = folder / "slurm.conf"
        conf.write_text(_CONF.format(**names, ctld=ports[0], slurmd=ports[1]))
        self.environ = {"SLURM_CONF": str(conf)}
        command = [*_OURS, _DAEMONS.format(folder)]
        with (folder / "daemons.log").open("w") as log:
            self._daemons = subprocess.Popen(command, env=os.environ | self.environ, stdout=log, stderr=log)
        until(lambda: "idle" in self("sinfo", "--noheader", check=False), 30)

    def __call__(self, *command, check=True, **environ):
        """What a command of Slurm says."""
        whole = os.environ | self.environ | environ
        done = subprocess.run([*map(str, command)], env=whole, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0 or not check, done.stderr + done.stdout
        return done.stdout

    def job(self, number):
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number)))

    def close(self):
        """Ends the daemons, and the jobs that they run."""
        self._daemons.kill()
        self._daemons.wait()
