"""Imports point down the layers, and one package alone moves bytes between ranks.

    6 others        integrations
    5 surface       recipes, looking, launch, local, deepspeed, checkpoint
    4 verbs         transforms, streamed
    3 execution     runtime, dtensor
    2 bytes         transport, one_host, storage, kernels, resting
    1 values        values: meshes, homes, tiers, layouts, units, schedules
    0 words         errors

Imports inside a layer are allowed as long as they make no cycle, file by file; imports for type checking count as imports.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "zero_fn"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("values",),
    ("transport", "one_host", "storage", "kernels", "resting"),
    ("runtime", "dtensor"),
    ("transforms", "streamed"),
    ("recipes", "looking", "launch", "local", "deepspeed", "checkpoint"),
    ("integrations", "__main__"),
)


def layer_of(module: str) -> int | None:
    """The layer of a module of the package, by its first name; None if the table does not have it."""
    first = module.partition(".")[0]
    return next((number for number, names in enumerate(LAYERS) if first in names), None)


def imports_of(source: str) -> set[str]:
    """Modules of the package that a source imports, without the name of the package."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_fn."):
            found.add((node.module or "").removeprefix("zero_fn."))
        elif isinstance(node, ast.ImportFrom) and node.module == "zero_fn":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("zero_fn.") for a in node.names if a.name.startswith("zero_fn.")}
        todo += ast.iter_child_nodes(node)
    return found


def upward_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports that point to a higher layer, and modules that have no layer."""
    wrong: list[str] = []
    for module, source in sources.items():
        own = layer_of(module)
        if own is None:
            wrong.append(f"{module} has no layer")
            continue
        for imported in sorted(imports_of(source)):
            other = layer_of(imported)
            if other is None or other > own:
                wrong.append(f"{module} (layer {own}) imports {imported} (layer {other})")
    return wrong


def package_sources() -> dict[str, str]:
    """The text of every module but `zero_fn/__init__.py`, which may import all of them."""
    sources: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module:
            sources[module] = path.read_text()
    return sources


def test_imports_point_down() -> None:
    assert upward_imports(package_sources()) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "values.layout",
            "from zero_fn.transport import links",
            "values.layout (layer 1) imports transport (layer 2)",
        ),
        ("errors", "import zero_fn.values.mesh", "errors (layer 0) imports values.mesh (layer 1)"),
        (
            "runtime.run",
            "def f():\n    from zero_fn.looking import plan",
            "runtime.run (layer 3) imports looking (layer 5)",
        ),
        (
            "values.home",
            "if TYPE_CHECKING:\n    from zero_fn.runtime.unit import Unit",
            "values.home (layer 1) imports runtime.unit (layer 3)",
        ),
        ("values.mesh", "from zero_fn import looking", "values.mesh (layer 1) imports looking (layer 5)"),
        ("values.mesh", "from zero_fn.novelty import x", "values.mesh (layer 1) imports novelty (layer None)"),
        ("novelty", "", "novelty has no layer"),
    ],
)
def test_the_check_fails_when_an_import_points_up(module: str, source: str, complaint: str) -> None:
    assert upward_imports({module: source}) == [complaint]


def test_the_check_passes_what_points_down_or_stays() -> None:
    assert (
        upward_imports({"runtime.run": "from zero_fn.values.layout import a\nfrom zero_fn.runtime.unit import b"}) == []
    )


def in_circles(sources: Mapping[str, str]) -> set[str]:
    """Files that reach themselves by imports, those for type checking included."""
    graph = {module: files_imported(source) & sources.keys() for module, source in sources.items()}
    found: set[str] = set()
    for module, imported in graph.items():
        reached: set[str] = set()
        todo = list(imported)
        while todo:
            each = todo.pop()
            if each not in reached:
                reached.add(each)
                todo += graph[each]
        if module in reached:
            found.add(module)
    return found


def files_imported(source: str) -> set[str]:
    """Like `imports_of`, and `from zero_fn.a import b` may mean the file `a.b`."""
    found = imports_of(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_fn."):
            found |= {f"{(node.module or '').removeprefix('zero_fn.')}.{alias.name}" for alias in node.names}
    return found


def test_no_file_is_in_a_circle() -> None:
    assert in_circles(package_sources()) == set()


_UP = "if TYPE_CHECKING:\n    from zero_fn.a.top import Top"


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a.top": "from zero_fn.a.low import f", "a.low": ""}, set()),
        ({"a.top": "from zero_fn.a.low import f", "a.low": _UP}, {"a.top", "a.low"}),
        ({"a.top": "from zero_fn.a import low", "a.low": _UP}, {"a.top", "a.low"}),
        ({"a.top": "import zero_fn.a.low", "a.low": _UP, "b": "from zero_fn.a.top import Top"}, {"a.top", "a.low"}),
        (
            {"a.top": "from zero_fn.b import f", "a.low": _UP, "b": "from zero_fn.a.low import f"},
            {"a.top", "a.low", "b"},
        ),
    ],
)
def test_the_check_finds_files_in_circles(sources: dict[str, str], circle: set[str]) -> None:
    assert in_circles(sources) == circle


COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv",
    "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "scatter", "send",
}  # fmt: skip


def collective_calls(source: str) -> list[str]:
    """Calls of collectives of `torch.distributed`, by any name it is imported as."""
    tree = ast.parse(source)
    modules = {"torch.distributed", "dist"}
    bare: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            bare |= {a.asname or a.name for a in node.names if a.name in COLLECTIVES}
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(
        call for call in calls if call in bare or (call.rpartition(".")[0] in modules and _last(call) in COLLECTIVES)
    )


def _last(call: str) -> str:
    return call.rpartition(".")[2]


def offenders(sources: Mapping[str, str], *, allowed: str) -> list[str]:
    return [
        f"{module}: {call}"
        for module, source in sources.items()
        if module.partition(".")[0] != allowed
        for call in collective_calls(source)
    ]


def test_transport_is_the_only_package_that_calls_collectives() -> None:
    assert offenders(package_sources(), allowed="transport") == []


def test_the_check_sees_collectives_by_any_name() -> None:
    assert collective_calls("import torch.distributed as d\nd.all_reduce(x)") == ["d.all_reduce"]
    assert collective_calls("from torch.distributed import broadcast as b\nb(x, 0)") == ["b"]
    assert collective_calls("x.scatter(0, i)") == []
