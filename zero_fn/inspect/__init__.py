"""What a transformed module holds and where, measured and planned.

describe       one line a unit: what it is cut into, and where that rests
memory         `held`: bytes held now, by kind and by tier
planned_bytes  `plan`: bytes held, sent and moved, before anything is allocated
check          whether an optimizer belongs to a module
table          rows of text in columns
"""
