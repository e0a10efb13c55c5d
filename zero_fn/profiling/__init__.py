"""Where the time of a step goes: `profile`.

clock       what a rank notes while it trains
spans       a step as spans of time, each of one part
ranks       rank 0 hears what all ranks have noted
analysis    what their records say together
operations  floating-point operations, and the most that a device can do
profile     all of it
text        ... on one screen
files       ... as a trace, a picture, a page, data
"""

from zero_fn.profiling.profile import Profile, profile

__all__ = ["Profile", "profile"]
