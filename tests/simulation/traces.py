"""What each rank asked of its axis: the same sequence on every rank, or something is wrong even if the numbers are right."""

from itertools import zip_longest

__all__ = ["Recorded", "Traces"]


class Traces:
    """Collectives by group and rank, in the order they were called. Entries hold nothing that may differ between ranks."""

    def __init__(self):
        self._entries = {}

    def note(self, group, rank, entry):
        """Adds one entry."""
        self._entries.setdefault(group, {}).setdefault(rank, []).append(entry)

    def difference(self, members):
        """Where two ranks of a group first differ; None if no two do."""
        for group, ranks in self._entries.items():
            first, *others = members[group]
            for other in others:
                for number, (one, two) in enumerate(zip_longest(ranks.get(first, []), ranks.get(other, []))):
                    if one != two:
                        return f"group {group!r}, collective {number}: rank {first} {one}, rank {other} {two}"
        return None


_SHAPES = {
    "gather_plan": lambda segments: [(each.numel, each.piece_numel, each.kind) for each in segments],
    "reduce_plan": lambda several: [(each.rows.numel(), each.piece_numel, each.kind) for each in several],
    "all_to_all": lambda sends: [len(sends)],
    "any": lambda bits: [bits.numel()],
    "exchange": lambda rows: [rows.shape],
}
"""What is noted of what a transport moves."""


class _Plan:
    """A plan, and the shapes of what it moves."""

    def __init__(self, inner, shapes):
        self.inner, self.shapes, self.numel = inner, shapes, inner.numel


class Recorded:
    """A transport whose operations are noted before they are done."""

    def __init__(self, inner, note):
        self._inner, self._note = inner, note

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if name.endswith("_plan"):
            return lambda pieces, *others: _Plan(found(pieces, *others), _SHAPES[name](pieces))

        def noted(what, *others):
            shapes, what = (what.shapes, what.inner) if isinstance(what, _Plan) else (_SHAPES[name](what), what)
            mark = others[-1] if others and isinstance(others[-1], int) else 0
            self._note((name, mark, *shapes))
            return found(what, *others)

        return noted if name in ("all_gather", "reduce_scatter", "all_to_all", "any", "exchange") else found
