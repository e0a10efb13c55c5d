"""N ranks in one process: the real runtime over messages that never leave it, one rank running at a time.

turns      whose turn it is: ranks are threads, a baton lets one run, a list of integers decides which
wires      messages between ranks, and the faults that befall them
group      a process group over the wires, with every collective that DTensor and zero_fn use
world      the process groups of `torch.distributed`, one set per rank
traces     what each rank asked of its axis, to be compared between ranks
simulated  the fixture: `simulated(2, schedule=[1, 0, 2]).run(fn, *args)`
"""

from tests.simulation.simulated import Case, Desync, Report, Simulated, axis
from tests.simulation.wires import Fault

__all__ = ["Case", "Desync", "Fault", "Report", "Simulated", "axis"]
