"""Ranks and what connects them: deadlines, preemption, the speed of links."""

from zero_fn.local.from_environment import StartedRank
from zero_fn.local.preemption import Preemption, preemption
from zero_fn.planning.links import measure_links
from zero_fn.transport.waiting import set_deadline

__all__ = ["Preemption", "StartedRank", "measure_links", "preemption", "set_deadline"]
