"""What a transformed module holds, sends and moves: as it is, and as it is planned.

describe   one line a unit: what it is cut into, and where that rests
held       bytes that are held now, by kind and by tier
check      what would go wrong at the next step
table      rows of text
predict    `plan`: bytes held, sent and moved, before anything is allocated
counted    ... of one group
walked     ... of the walk through all units
autoplan   which stage and tiers fit a budget, and how long a step takes
proposals  ... as a table
links      how fast the links between ranks are
"""

from zero_fn.looking.autoplan import autoplan
from zero_fn.looking.links import LinkSpeeds, measure_links
from zero_fn.looking.predict import Plan, plan
from zero_fn.looking.proposals import Proposal, Proposals

__all__ = ["LinkSpeeds", "Plan", "Proposal", "Proposals", "autoplan", "measure_links", "plan"]
