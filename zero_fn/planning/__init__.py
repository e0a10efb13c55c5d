"""Which stage, tiers and mesh to choose, how long a step takes, and what this machine offers.

proposals        `autoplan`: stages and tiers that fit a budget, the fastest first
configurations   the same for machines that are not there: meshes of one and two axes
plan_command     `python -m zero_fn plan`
code_of_plan     a proposal as a program
models           a model on `meta`: from a config.json, a function, or a size such as 70B
repeated_layers  a few layers that stand for all
activations      bytes and operations of a forward and backward, on fake tensors
machines         accelerators by their data sheets, and what lies between them
links            `measure_links`: the speed of memory, disks, collectives and copies
links_command    `python -m zero_fn links`
environment      `python -m zero_fn env`
"""

from zero_fn.planning.links import LinkSpeeds
from zero_fn.planning.proposals import Proposal, Proposals, autoplan

__all__ = ["LinkSpeeds", "Proposal", "Proposals", "autoplan"]
