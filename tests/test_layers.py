"""Imports point down the layers, one package alone moves bytes between ranks, and none draws from generators of the user.

    7 others        integrations
    6 surface       inspect, planning, profiling, monitor, launch, local, deepspeed, checkpoint, weights, wire, distributed
    5 verbs         transforms, streamed, owners, average
    4 execution     runtime, dtensor, advice
    3 tiers         tiers: tensors that rest in them
    2 bytes         transport, one_host, storage, kernels
    1 values        values: meshes, homes, tiers, layouts, units, schedules
    0 words         errors

Imports inside a layer are allowed as long as they make no cycle, file by file; imports for type checking count as imports.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zero_fn"

LAYERS = (
    ("errors",),
    ("values",),
    ("transport", "one_host", "storage", "kernels"),
    ("tiers",),
    ("runtime", "dtensor", "advice"),
    ("transforms", "streamed", "owners", "average"),
    (
        "inspect",
        "planning",
        "profiling",
        "monitor",
        "launch",
        "local",
        "deepspeed",
        "checkpoint",
        "weights",
        "wire",
        "distributed",
    ),
    ("integrations", "__main__"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv",
    "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "scatter", "send",
}  # fmt: skip

SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "set_state"}
DRAWS = {
    "bernoulli", "bernoulli_", "exponential_", "multinomial", "normal", "normal_", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_",
}  # fmt: skip


def package_sources():
    """The text of every module but `zero_fn/__init__.py`, which may import all of them."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))}
    return {n.removesuffix(".__init__"): path.read_text() for path, n in names.items() if n != "__init__"}


def imports_of(source):
    """What a source imports of the package, as modules and as names in modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("zero_fn.") for name in found if name.startswith("zero_fn.")}


def wrong_imports(sources):
    """Imports that point to a higher layer or to none, and a circle of files."""
    wrong, graph = [], {module: imports_of(source) for module, source in sources.items()}
    for module, imported in graph.items():
        own = LAYER.get(module.partition(".")[0], -1)
        others = {name.partition(".")[0] for name in imported}
        wrong += [f"{module} imports {name}" for name in sorted(others) if not 0 <= LAYER.get(name, 99) <= own]
    try:
        TopologicalSorter({module: imported & sources.keys() for module, imported in graph.items()}).prepare()
    except CycleError as error:
        wrong.append(" <- ".join(error.args[1]))
    return wrong


def collective_calls(source):
    """Calls of collectives of `torch.distributed`, by any name it is imported as."""
    tree = ast.parse(source)
    modules, bare = {"torch.distributed", "dist"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            bare |= {a.asname or a.name for a in node.names if a.name in COLLECTIVES}
    named = {f"{module}.{name}" for module in modules for name in COLLECTIVES} | bare
    return [call for node in ast.walk(tree) if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in named]


def draws_of_the_user(source):
    """Calls that seed a generator of the process, or draw from it: without a `generator` of their own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            seeds = name in SEEDS and not owner.startswith("torch.Generator(")
            draws = name in DRAWS and not any(keyword.arg == "generator" for keyword in node.keywords)
            found += [f"{owner}.{name}"] * (seeds or draws)
    return found


def test_imports_point_down_and_no_file_is_in_a_circle():
    assert wrong_imports(package_sources()) == []


def test_transport_is_the_only_package_that_calls_collectives():
    sources = {module: source for module, source in package_sources().items() if not module.startswith("transport")}
    assert {module: calls for module, source in sources.items() if (calls := collective_calls(source))} == {}


def test_nothing_seeds_a_generator_of_the_user_or_draws_from_it():
    """But a rank, which is forked, of numpy."""
    sources = {module: source for module, source in package_sources().items() if module != "local.launcher"}
    assert {module: calls for module, source in sources.items() if (calls := draws_of_the_user(source))} == {}


UP = "if TYPE_CHECKING:\n    from zero_fn.values.top import Top"


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"values.layout": "from zero_fn.transport import links"}, "values.layout imports transport"),
        ({"runtime.run": "def f():\n    import zero_fn.inspect.planned_bytes"}, "runtime.run imports inspect"),
        ({"values.mesh": "from zero_fn import novelty"}, "values.mesh imports novelty"),
        ({"novelty": "import zero_fn.errors"}, "novelty imports errors"),
        ({"runtime.run": "from zero_fn.values.layout import a\nfrom zero_fn.runtime.unit import b"}, None),
        ({"values.top": "from zero_fn.values import low", "values.low": UP}, "values.top <- values.low <- values.top"),
        ({"values.top": "from zero_fn.values import low", "values.low": ""}, None),
    ],
)
def test_a_wrong_import_is_seen(sources, complaint):
    assert wrong_imports(sources) == ([complaint] if complaint else [])


def test_collectives_are_seen_by_any_name():
    assert collective_calls("import torch.distributed as d\nd.all_reduce(x)") == ["d.all_reduce"]
    assert collective_calls("from torch.distributed import broadcast as b\nb(x, 0)") == ["b"]
    assert collective_calls("x.scatter(0, i)") == []


def test_draws_of_the_user_are_seen():
    assert draws_of_the_user("torch.manual_seed(0)\nx.normal_()") == ["torch.manual_seed", "x.normal_"]
    assert draws_of_the_user("x.normal_(generator=torch.Generator().manual_seed(0))") == []


def unmapped(folder):
    """Files and folders of a folder that the docstring of its `__init__` does not name."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    inside = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
    return [name for name in inside if name != "__init__" and not re.search(rf"\b{name}\b", text)]


def test_each_folder_has_a_map_of_its_files():
    folders = [path.parent for path in PACKAGE.glob("*/**/__init__.py")]
    assert {folder.name: unmapped(folder) for folder in folders if unmapped(folder)} == {}


def test_a_file_without_a_place_on_the_map_is_found(tmp_path):
    (tmp_path / "__init__.py").write_text('"""sinks  where numbers go"""\n')
    (tmp_path / "sinks.py").touch()
    (tmp_path / "tally.py").touch()
    assert unmapped(tmp_path) == ["tally"]
