"""How many bugs that nobody chose do the tests see? Mutants of cosmic-ray, drawn by a seed, planted in a copy of the project.

    python -m tests.mutations.sample --count 200 --seed 0 --folder runtime checkpoint storage streamed transforms --out DIR

cosmic-ray has to be there: in an environment of its own that finds what is installed for the project, too. A position in the
code is drawn first, then one of the mutants there, so files have as many as they have positions. Docstrings, types, and what
is raised or warned are left out. Each test that is named for a folder (`TESTS`) runs once over a package that notes which
statements run, on all ranks. A mutant then meets the tests that run its statement, quick ones first. `DIR/mutants.jsonl` has
a line for each mutant; what is in DIR is not done again, so a run can go on. Survivors that change nothing are in
`equivalents.json`, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tests.mutations.__main__ import _copy
from tests.mutations.warm import Notes, Row, add, changes, load, noting, rows, run_pytest, warm_up

_SIMULATED = ["property_tests/test_training_laws.py", "property_tests/test_axes_laws.py"]
_TIERS = [
    "property_tests/test_streamed_laws.py",
    "tests/accelerator",
    "tests/units/inspect",
    "tests/units/planning",
]
_RANKS = ["tests/promises"]
TESTS = {
    "storage": ["tests/units/storage", "tests/units/streamed", "tests/units/transforms", *_TIERS],
    "streamed": ["tests/units/streamed", "tests/units/runtime", "tests/units/transforms", *_TIERS],
    "transforms": [
        "tests/units/transforms",
        "tests/errors",
        *_SIMULATED,
        "property_tests/test_transform_laws.py",
        *_RANKS,
    ],
    "extras": ["tests/units/extras", "tests/errors", "property_tests/test_streamed_laws.py"],
    "checkpoint": [
        "tests/units/checkpoint",
        "tests/errors",
        "property_tests/test_checkpoint_laws.py",
        "tests/promises",
    ],
    "runtime": [
        "tests/units/runtime",
        "tests/units/values/test_schedule.py",
        *_SIMULATED,
        "tests/errors",
        *_RANKS,
        "tests/units/streamed",
        *_TIERS,
        "tests/axes",
        "tests/test_host_calls.py",
    ],
}
"""The tests named for each folder."""

EQUIVALENTS = Path(__file__).with_name("equivalents.json")
_BATCHES = (5, 10_000)  # tests of a mutant that run in one process
_BY_TIME = re.compile("^E .*(RankHung|Timeout|did not answer|did not return)", re.MULTILINE)
_SAME = ("_Is_Eq", "_IsNot_NotEq")  # the same of None and of classes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.sample")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", nargs="+", default=sorted(TESTS), choices=sorted(TESTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--note", nargs="*", help="tests whose statements are noted, in place of those named")
    parser.add_argument("--budget-s", type=float, default=60.0, help="of the tests of a mutant")
    given = parser.parse_args()
    out: Path = given.out.absolute()
    warm_up()
    if not (out / "statements.json").exists():
        _copy(out / "copy")
        _copy(out / "noting")
        (out / "statements.json").write_text(json.dumps(noting(out / "noting")))
    named = given.note if given.note is not None else [name for folder in given.folder for name in TESTS[folder]]
    _note_tests(out, named)
    drawn, wanted = out / "drawn.jsonl", {"seed": given.seed, "folder": given.folder, "count": given.count}
    if rows(drawn)[:1] != [wanted]:
        drawn.unlink(missing_ok=True)
        for row in (wanted, *islice(_drawn(out / "copy", given.folder, given.seed), given.count)):
            add(drawn, row)
    if os.fork() == 0:  # what changes functions only; the others need the package anew
        files = [row["file"] for row in rows(out / "noted.jsonl") if "file" in row]
        load(out / "copy", files, out / "collected")
        _judge_all(out, rows(drawn)[1:], given.budget_s, is_loaded=True)
        os._exit(0)
    os.wait()
    _judge_all(out, rows(drawn)[1:], given.budget_s, is_loaded=False)
    _print_rate(out)


def _note_tests(out: Path, named: list[str]) -> None:
    """Runs tests that have not run yet over the package that notes, a file at a time."""
    known = {row["file"] for row in rows(out / "noted.jsonl") if "file" in row}
    for name in named:
        place = out / "noting" / name
        for path in [place] if place.is_file() else sorted(place.rglob("test_*.py")):
            file = str(path.relative_to(out / "noting"))
            if file not in known:
                known.add(file)
                code = run_pytest(out / "noting", [file], Notes(out / "noted.jsonl", ran=True), out / "log", 1200.0)
                add(out / "noted.jsonl", {"file": file, "code": code})


def _judge_all(out: Path, drawn: list[Row], budget_s: float, *, is_loaded: bool) -> None:
    """Judges what was not judged yet; what survived before meets the tests that were noted since."""
    known = {_key(row): row for row in rows(out / "mutants.jsonl")}
    statements = json.loads((out / "statements.json").read_text())
    noted = [row for row in rows(out / "noted.jsonl") if "hits" in row]
    for mutant in sorted(drawn, key=lambda mutant: _key(mutant) in known):
        path, before = out / "copy" / mutant["file"], known.get(_key(mutant))
        mutant["codes"] = changes(path.read_text(), mutant["changed"], str(path))
        is_judged = before is not None and (before["verdict"] != "survived" or _changes_nothing(mutant))
        if is_loaded is (mutant["codes"] is None) or is_judged:
            continue
        met = before["met"] if before is not None else []
        while True:
            left_out = {*met, *(row["test"] for row in rows(out / "fits.jsonl") if not row["fits"])}
            found = _meeting(mutant, statements, [row for row in noted if row["test"] not in left_out], budget_s)
            if not found and before is not None:
                break
            row = _judge(out, mutant, found, met, limit_s=60.0 + 3 * budget_s)
            if "::" not in row["by"] or _fits(out, row["by"]):
                add(out / "mutants.jsonl", row)
                break


def _fits(out: Path, test: str) -> bool:
    """Whether a test passes without a mutant; run once."""
    known = {row["test"]: row["fits"] for row in rows(out / "fits.jsonl")}
    if test not in known:
        notes = out / "clean.jsonl"
        known[test] = run_pytest(out / "copy", [test], Notes(notes, ran=False), out / "log", 240.0) == 0
        add(out / "fits.jsonl", {"test": test, "fits": known[test]})
    return bool(known[test])


def _changes_nothing(row: Row) -> bool:
    return (row["file"], row["diff"]) in _equivalents()


@cache
def _equivalents() -> list[tuple[str, list[str]]]:
    return [(row["file"], row["diff"]) for row in json.loads(EQUIVALENTS.read_text())]


def _print_rate(out: Path) -> None:
    judged = {_key(row): row for row in rows(out / "mutants.jsonl")}
    counts = Counter("equivalent" if _changes_nothing(row) else row["verdict"] for row in judged.values())
    print(
        dict(counts), f"caught: {counts['caught'] / max(1, len(judged) - counts['equivalent']):.3f} of no equivalents"
    )


def _key(row: Row) -> tuple[Any, ...]:
    return row["file"], *row["start"], row["operator"]


# -- mutants -----------------------------------------------------------------------------------------------------------


def _drawn(root: Path, folders: list[str], seed: int) -> Iterator[Row]:
    """All positions that can be changed, in an order of this seed, with one change each."""
    from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]
    from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]
    from cosmic_ray.plugins import get_operator, operator_names  # type: ignore[import-not-found]

    families: dict[str, list[str]] = defaultdict(list)  # operators that change the same positions
    for name in operator_names():
        if not get_operator(name).arguments() and not name.endswith(_SAME):
            families[name.rpartition("_")[0] or name].append(name)
    positions: list[tuple[str, list[int], list[tuple[str, int]]]] = []
    for path in (path for folder in sorted(folders) for path in sorted((root / "zero_fn" / folder).rglob("*.py"))):
        nodes = [
            node for node in ast_nodes(get_ast(path.read_text())) if node.type not in ("name", "string", "newline")
        ]
        skipped = list(_skipped(ast.parse(path.read_text())))
        for names in families.values():
            operator = get_operator(names[0])()
            there: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
            for occurrence, (start, _) in enumerate(at for node in nodes for at in operator.mutation_positions(node)):
                there[start] += [(name, occurrence) for name in names]
            for start, at in there.items():
                if not any(first <= start < last for first, last in skipped):
                    positions.append((str(path.relative_to(root)), list(start), at))
    generator = random.Random(seed)
    generator.shuffle(positions)
    for file, start, at in positions:
        operator_name, occurrence = generator.choice(at)
        source = (root / file).read_text()
        changed = mutate_code(source, get_operator(operator_name)(), occurrence)
        if changed is None:  # this operator of the family has fewer positions in the file
            continue
        with suppress(SyntaxError):  # the star of a signature is taken for an operator
            compile(changed, file, "exec")
            diff = [line for line in difflib.ndiff(source.splitlines(), changed.splitlines()) if line[0] in "+-"]
            yield {"file": file, "start": start, "operator": operator_name, "diff": diff, "changed": changed}


def _skipped(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand, and what is raised, warned, or said by an assertion."""
    aliases = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    for node in ast.walk(tree):
        found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        is_type = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and node in aliases
        is_said = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warn", "cast", "TypeVar"))
        found += [node if isinstance(node, ast.Raise) or is_type or is_said else None]
        found += [node.msg if isinstance(node, ast.Assert) else None]
        for each in filter(None, found):
            yield (each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)


def _meeting(mutant: Row, statements: list[Any], tests: list[Row], budget_s: float) -> list[str]:
    """Tests that run the statement of a mutant: quick ones, then each function once before any of them a second time."""
    line = mutant["start"][0]
    inside = {n: (first, last) for n, (file, first, last) in enumerate(statements) if file == mutant["file"]}
    around = [(last - first, n) for n, (first, last) in inside.items() if first <= line <= last]
    wanted = {min(around)[1]} if around else set(inside)  # of a module or a class: whatever runs its functions
    found = sorted((row for row in tests if not wanted.isdisjoint(row["hits"])), key=lambda row: row["seconds"])
    turns, ranked = Counter[str](), []
    for row in found:
        function = row["test"].partition("[")[0]
        is_quick = row["seconds"] < 0.1  # as a case of the errors is, which has little to do with the others
        ranked.append((0 if is_quick else turns[function], row["seconds"], row["test"]))
        turns[function] += 1
    chosen: list[str] = []
    spent_s = 0.0
    for _, seconds, test in sorted(ranked):
        spent_s += seconds
        if spent_s < budget_s or not chosen:
            chosen.append(test)
    return chosen


def _judge(out: Path, mutant: Row, tests: list[str], met: list[str], limit_s: float) -> Row:
    """Plants a mutant, runs tests until one fails, and puts the file back. `met`: tests that it has survived before."""
    path = out / "copy" / mutant["file"]
    source, stamp, began = path.read_text(), path.stat().st_mtime, time.monotonic()
    row: Row = {**mutant, "verdict": "survived", "by": "", "text": "", "met": [*met, *tests]}
    changed, codes, notes, sizes = row.pop("changed"), row.pop("codes"), out / "failed.jsonl", iter(_BATCHES)
    try:
        path.write_text(changed)
        os.utime(path, (began, began))  # whole seconds that no other text has: bytecode is kept by them
        while tests and row["verdict"] == "survived":
            size = next(sizes)
            batch, tests = tests[:size], tests[size:]
            notes.unlink(missing_ok=True)
            plugin = Notes(notes, ran=False)
            code = run_pytest(out / "copy", ["-x", *batch], plugin, out / "log", limit_s, codes)
            failed = next(iter(rows(notes)), None)
            if failed is not None:
                is_by_time = _BY_TIME.search(failed["failed"])
                row |= {"verdict": "timed out" if is_by_time else "caught", "by": failed["test"]}
                row |= {"text": failed["failed"], "met": []}
            elif code != 0:
                row |= {"verdict": "timed out" if code is None else "caught", "by": f"pytest ended with {code}"}
    finally:
        path.write_text(source)
        os.utime(path, (stamp, stamp))
    return {**row, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main()
