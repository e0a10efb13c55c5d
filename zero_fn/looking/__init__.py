"""What a transformed module holds, sends and moves: as it is, and as it is planned.

describe   one line a unit: what it is cut into, and where that rests
held       bytes that are held now, by kind and by tier
check      what would go wrong at the next step
table      rows of text
predict    `plan`: bytes held, sent and moved, before anything is allocated
autoplan   which stage and tiers fit a budget, and how long a step takes
links      how fast bytes move: between ranks, to and from disks and an accelerator
sweep      how fast a disk is with blocks of several sizes
measured   `python -m zero_fn links`
environment  `python -m zero_fn env`
"""

from zero_fn.inspect.planned_bytes import Plan, plan
from zero_fn.planning.links import LinkSpeeds, measure_links
from zero_fn.planning.proposals import Proposal, Proposals, autoplan

__all__ = ["LinkSpeeds", "Plan", "Proposal", "Proposals", "autoplan", "measure_links", "plan"]
