"""Where the time of a step goes: `profile`.

clock        marks: what a rank notes while it trains
spans        a step as spans of time, each of one part
record       the spans and numbers of one rank, for rank 0
host_clocks  how far the clocks of hosts differ
steps        the parts of each step, and computation by unit, over all ranks
collectives  who was waited for, and what links carried
slow_ranks   the ranks that take longer than the others, and where
findings     all that the records of the ranks say
operations   floating-point operations, and the most that a device can do
profile      `profile` and `Profile`
text         a profile on one screen
trace        a profile as a trace for Perfetto
timeline     one step as a picture
"""

from zero_fn.profiling.profile import Profile, profile

__all__ = ["Profile", "profile"]
