"""`each_as_replicas`: a test of a table, of whose rows each gives under stages what it gives in replicas."""

import pytest

from tests.support.worlds import DAILY, differences, trained


def each_as_replicas(rows, *, n=2, stages=DAILY, deadline_s=60.0, nightly=(), **how):
    """A test of a table.

    Args:
        rows: By its name, a trial; or what builds a model, and a program; or these and `how` they are trained, as a dict, in
            which `n` and `stages` may be others than those of the table.
        n, stages, deadline_s: Ranks, what is compared with replicas, and seconds.
        nightly: The names of long rows.
    """
    marks = {name: [pytest.mark.nightly] * (name in nightly) for name in rows}

    @pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in rows])
    def test(ranks, name):
        row = rows[name]
        build, program, *own = (None, row) if callable(row) else row
        options = {"n": n, "stages": stages, **how}
        options.update(*own)
        size, worlds = options.pop("n"), options.pop("stages")
        trial = trained(build, program, **options) if build else program
        assert ranks(size, deadline_s=deadline_s).run(differences, trial, stages=worlds) == [[]] * size

    return test
