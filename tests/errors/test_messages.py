"""What all errors have, and the set of their texts, `snapshots/*.txt`: each is asserted where its promise is tested.

    SNAPSHOTS=write .ci/test FILES      # writes them again; read the difference before you commit it

Line numbers and addresses are replaced, so that moving a line changes nothing (`tests/support/messages.py`).
"""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from tests.support.messages import SNAPSHOTS, Headed, refused
from tests.support.ranks import axis
from tests.support.snapshot import is_writing
from zero_fn.errors import LayoutError, StaleError, ZeroError

PACKAGE = Path(__file__).parents[2] / "zero_fn"


# -- notes of errors that torch raises -------------------------------------------------------------------------------


class Peeking(Headed):
    """Reads a weight of the first layer outside the forward of its unit."""

    def forward(self, x):
        return super().forward(x @ next(self.layers[0].parameters()).T)


def test_an_operation_that_torch_refuses_in_a_forward_has_a_note():
    with alone() as mesh, pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as caught:
        zf.shard_params(nn.Sequential(Peeking()), mesh)(torch.ones(2, 4))
    assert caught.value.__notes__ == [
        "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.\n"
        "  inside : the forward of unit root\n"
        "  fix    : call the module that owns the weight, put both modules in one unit (units=), or read it inside "
        "`with zf.unsharded(module):`"
    ]


class CastingToParameters(nn.Module):
    """Casts its input to the dtype of its parameters, as `self.dtype` of transformers says it."""

    def __init__(self):
        super().__init__()
        self.linear, self.filter = nn.Linear(4, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x, *, filters):
        x = x.to(next(self.parameters()).dtype)
        output = self.filter(x[..., None]) if filters else self.linear(x)
        return output


TWO_DTYPES = (
    "The forward computes in bfloat16 (zf.precision); parameters() gives what rests, in float32, here, too.\n"
    "  inside : the forward of unit root\n"
    "  fix    : cast to the dtype of a weight that is read under its name ('linear.weight'), as in "
    "x.to(self.linear.weight.dtype), and not to that of next(self.parameters())"
)


@pytest.mark.parametrize("filters", [False, True])
def test_two_dtypes_in_a_forward_have_a_note(filters):
    """Where the forward computes in another dtype than the one at rest; else torch's words are all that can be said."""
    with alone() as mesh:
        for model, notes in (
            (zf.precision(zf.shard_params(CastingToParameters(), mesh), compute=torch.bfloat16), [TWO_DTYPES]),
            (zf.shard_params(CastingToParameters().bfloat16(), mesh), []),
        ):
            model.linear.register_forward_pre_hook(lambda _, args: (args[0].float(),))  # a dtype too many for both
            model.filter.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            with pytest.raises(RuntimeError) as caught:
                model(torch.ones(2, 4), filters=filters)
            assert getattr(caught.value, "__notes__", []) == notes


def test_another_error_in_a_forward_has_no_note():
    with alone() as mesh:
        model = zf.precision(zf.shard_params(nn.Linear(4, 4), mesh), compute=torch.bfloat16)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            model(torch.ones(2, 5))
        assert not hasattr(caught.value, "__notes__")


# -- errors that need ranks ------------------------------------------------------------------------------------------


def layouts_differ():
    width = 4 + dist.get_rank()
    zf.shard_params(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), axis())(torch.ones(1, 4))


def initial_values_differ():
    torch.manual_seed(dist.get_rank())
    zf.shard_params(nn.Linear(4, 4), axis())(torch.ones(1, 4))


def buffers_differ():
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.zeros(2 + dist.get_rank()))
    zf.shard_params(model, axis())(torch.ones(1, 4))


def edits_differ():
    model = zf.shard_params(nn.Linear(4, 4), axis())
    with zf.unsharded(model, writeback=True), torch.no_grad():
        model.bias.fill_(float(dist.get_rank()))


DISAGREEMENTS = (layouts_differ, initial_values_differ, buffers_differ, edits_differ)


@pytest.mark.parametrize("mistake", DISAGREEMENTS, ids=lambda m: m.__name__)
def test_disagreement_of_ranks_is_the_snapshot(ranks, mistake):
    def on_a_rank():
        with refused(mistake.__name__) as caught:
            mistake()
        return str(caught.value)

    first, second = ranks(2).run(on_a_rank)
    assert first == second


# -- the whole set ---------------------------------------------------------------------------------------------------


def summaries_in(source):
    """The first argument of every error a source raises, as a regular expression."""
    kinds = {name for name in dir(zf) if name.endswith("Error")}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            summary = node.args[0]
            if isinstance(summary, ast.Constant):
                found.append(re.escape(str(summary.value)))
            elif isinstance(summary, ast.JoinedStr):
                parts = (re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in summary.values)
                found.append("".join(parts))
    return found


# Needs torchrun, GPUs, dying ranks: tests/units/local/test_launch.py and tests/units/local/test_launcher.py have them.
ELSEWHERE = {"local", "launch.py", "line.py"}


def test_every_error_has_a_snapshot():
    known = [path.read_text().splitlines()[0].partition(": ")[2] for path in SNAPSHOTS.glob("*.txt")]
    for path in sorted(PACKAGE.rglob("*.py")):
        if not ELSEWHERE.isdisjoint(path.relative_to(PACKAGE).parts):
            continue
        for summary in summaries_in(path.read_text()):
            assert any(re.fullmatch(summary, line) for line in known), f"{path.name}: no snapshot of {summary!r}"


def test_every_snapshot_is_asserted_by_a_test():
    tests = Path(__file__).parents[1]
    files = [path for folder in (tests, tests.parent / "property_tests") for path in folder.rglob("*")]
    sources = [path.read_text() for path in files if path.suffix in (".py", ".toml", ".json")]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    assert {path.stem for path in SNAPSHOTS.glob("*.txt")} <= words or is_writing()


# -- the base --------------------------------------------------------------------------------------------------------


def test_an_error_is_a_summary_aligned_facts_and_a_fix():
    error = LayoutError("It is wrong.", first=1, long_name="two", fix="do(this)")
    assert str(error) == "It is wrong.\n  first     : 1\n  long_name : two\n  fix       : do(this)"
    assert (error.summary, error.fix, error.facts) == ("It is wrong.", "do(this)", {"first": 1, "long_name": "two"})


@pytest.mark.parametrize("kind", [value for name, value in sorted(vars(zf).items()) if name.endswith("Error")])
def test_every_error_is_a_builtin_one_too(kind):
    assert kind is ZeroError or issubclass(kind, ValueError | RuntimeError)


def test_an_error_crosses_processes_with_its_facts():
    error = StaleError("Old.", axis=torch.float32, fix="new")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is StaleError
        assert str(twin) == str(error)
        assert twin.facts == {"axis": "torch.float32"}
