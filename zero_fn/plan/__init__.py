"""What a transformed module will hold and send, predicted from homes and schedules."""

from zero_fn.plan.predict import Plan, plan

__all__ = ["Plan", "plan"]
