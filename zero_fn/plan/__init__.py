"""Predictions of the bytes that a transformed module holds, sends and moves, and of the time that a step takes."""

from zero_fn.plan.autoplan import autoplan
from zero_fn.plan.links import LinkSpeeds, measure_links
from zero_fn.plan.predict import Plan, plan
from zero_fn.plan.proposals import Proposal, Proposals

__all__ = ["LinkSpeeds", "Plan", "Proposal", "Proposals", "autoplan", "measure_links", "plan"]
