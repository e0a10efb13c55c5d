"""What a transformed module holds and where, measured and planned.

describe       one line a unit: what it is cut into, and where that rests
memory         `memory`: bytes held now, by kind and by tier
planned_bytes  `plan`: bytes held, sent and moved, before anything is allocated
check          whether an optimizer belongs to a module
table          rows of text in columns
"""

from zero_fn.inspect.check import check, is_transformed
from zero_fn.inspect.describe import Description, describe
from zero_fn.inspect.memory import MemoryUse, memory
from zero_fn.inspect.planned_bytes import Plan, plan

__all__ = [
    "Description",
    "MemoryUse",
    "Plan",
    "check",
    "describe",
    "is_transformed",
    "memory",
    "plan",
]
