"""Every block of Python in README.md and docs/ is run: the blocks of a page are one program, in their order.

A page without a mark is run by one process, as a script. A page that begins with `<!-- ranks: N -->` is run by N ranks, and
begins with the lines of docs/guides/index.md. A block after `<!-- not run: why -->` needs what a test lacks: it is parsed.
What pages and the package itself refer to is there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from dataclasses import dataclass
from functools import cache

import pytest

from tests.outside.examples.programs import ALONE, run_alone, run_on_a_rank
from tests.outside.examples.programs import ROOT as _ROOT
from tests.outside.integrations.worlds import import_all

_GUIDES = _ROOT / "docs" / "guides" / "index.md"
_MADE = {"_build", "_generated"}
_PAGES = [
    _ROOT / "README.md",
    *(path for path in sorted((_ROOT / "docs").rglob("*.md")) if not _MADE.intersection(path.parts)),
]
_BLOCK = re.compile(r"^(?P<mark><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCKS = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_RANKS = re.compile(r"\A<!-- ranks: (\d+) -->\n")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_MENTION = re.compile(r"((?:[\w-]+/)*[\w-]+\.md|\bREADME\b)(?:, ([A-Z][\w ]+))?")
"""A page in a text of the package, and the section if one is named: `docs/limits.md`, `README, Install`."""
_FILE = re.compile(r"`(?:python )?((?:[\w.]+/)+\w+\.(?:py|c|txt|md|cpp))(?:::\w+)?`")


@dataclass(frozen=True)
class Page:
    """A page: its path below the root, its blocks that are run and those that are not, and how many ranks run it."""

    name: str
    run: tuple[tuple[int, str], ...]
    parsed: tuple[tuple[int, str], ...]
    ranks: int | None

    def program(self):
        """The blocks that are run, each in the lines of the page, so that a traceback names the page's lines."""
        lines = []
        for line, code in self.run:
            lines += [""] * (line - 1 - len(lines))
            lines += code.splitlines()
        return "\n".join(lines) + "\n"


def page_of(path):
    """Reads one page."""
    text = path.read_text(encoding="utf-8")
    run, parsed = [], []
    for found in _BLOCK.finditer(text):
        block = (text.count("\n", 0, found.start("code")) + 1, found["code"])
        (parsed if found["mark"] else run).append(block)
    ranks = _RANKS.match(text)
    return Page(str(path.relative_to(_ROOT)), tuple(run), tuple(parsed), int(ranks[1]) if ranks else None)


_ALL = [page_of(path) for path in _PAGES]
_UNDER_TORCHRUN = ("docs/start/launching.md", "docs/reports.md")


def _ids(pages):
    return pytest.mark.parametrize("page", pages, ids=[page.name for page in pages])


@_ids([page for page in _ALL if page.run and page.ranks])
def test_a_page_runs_on_ranks(page, ranks, tmp_path):
    assert page.ranks is not None
    case = ranks(page.ranks, deadline_s=240)
    if "zero_fn.integrations" in page.program():
        case.run(import_all)  # which may take longer than a collective may wait for a peer
    case.run(run_on_a_rank, page.program(), page.name, str(tmp_path))


@_ids([page for page in _ALL if page.run and not page.ranks and page.name not in ("README.md", "docs/guides/index.md")])
def test_a_page_runs_as_a_script(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(page.program())
    said = run_alone(tmp_path, script, environ=ALONE if page.name in _UNDER_TORCHRUN else None)
    assert said.ended == 0, said


def test_the_first_example_learns_and_gives_ranks_batches_of_their_own(tmp_path):
    """What the README promises of its fifteen lines: two ranks, whose losses differ, and fall."""
    script = tmp_path / "page.py"
    script.write_text(page_of(_ROOT / "README.md").program())
    said = run_alone(tmp_path, script)
    found = re.findall(r"rank (\d): loss ([\d.]+) -> ([\d.]+), ([\d,]+) bytes held", said.out)
    assert [rank for rank, *_ in found] == ["0", "1"], said
    assert all(float(last) < float(first) / 5 for _, first, last, _ in found), found
    assert found[0][1] != found[1][1], "ranks trained on the same batch"


@pytest.mark.parametrize("path", _PAGES, ids=[page.name for page in _ALL])
def test_a_page_is_sound(path):
    """Blocks are Python and in no list, where they would be neither run nor parsed; links lead somewhere; rows belong to a
    table; files that are named are there, below the root, the package or the tests. (The log names files as they were.)"""
    text, page = path.read_text(encoding="utf-8"), page_of(path)
    for _, code in (*page.run, *page.parsed):
        ast.parse(code)
    assert not re.search(r"^ +```python$", text, re.MULTILINE)
    if page.ranks:
        assert page.run[0][1] == page_of(_GUIDES).run[0][1], "the first lines are not those of docs/guides/index.md"
        assert f"`torchrun --nproc-per-node {page.ranks}`" in text.partition("```python")[0]
    for name in _FILE.findall(text) if path.parent.name != "log" else ():
        assert any((_ROOT / folder / name).exists() for folder in ("", "zero_fn", "tests")), name
    text = _BLOCKS.sub("", text)
    for target, place in _LINK.findall(text):
        if not re.match(r"https?:|mailto:", target):
            found = path.parent / target if target else path
            assert found.exists(), f"{target} is not there"
            assert not place or place in _anchors(found), f"#{place} of {found.name} is not there"
    lines = ["", *text.splitlines(), ""]
    for number, line in enumerate(lines):
        if line.startswith("|") and not lines[number - 1].startswith("|"):  # else it would be shown as text
            assert set(lines[number + 1]) <= set("|-: "), f"a row without a table: {line}"


def _headings(path):
    text = _BLOCKS.sub("", path.read_text(encoding="utf-8"))
    return set(re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE))


def _anchors(path):
    """What comes after `#` in links to a page: its headings; to a lesson: its pictures."""
    if path.suffix == ".ipynb":
        return {f"picture-{number + 1}" for number in range(path.read_text(encoding="utf-8").count('"image/png":'))}
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in _headings(path)}


_TEXTS = [path for path in sorted((_ROOT / "zero_fn").rglob("*")) if path.suffix in (".py", ".toml", ".c")]


def test_pages_that_the_package_names_are_there():
    """In docstrings, in fixes of errors, and in the table of entries of a DeepSpeed config."""
    found = [(path.name, *said) for path in _TEXTS for said in _MENTION.findall(path.read_text(encoding="utf-8"))]
    assert len(found) > 5
    for where, name, section in found:
        page = _ROOT / (name if name.endswith(".md") else f"{name}.md")
        assert page.is_file(), f"{where} names {name}, which is not there"
        assert not section or section in _headings(page), f"{where} names {section} in {name}, which is not there"


def test_names_that_the_package_tells_to_write_are_there():
    """`zf.save_pretrained`, `torch.profiler`: in docstrings, fixes and the table, where no linter looks."""
    for path in _TEXTS:
        for name in set(re.findall(r"\b(?:zf|torch)(?:\.[A-Za-z_]\w*)+", path.read_text(encoding="utf-8"))):
            assert _named(name.replace("zf.", "zero_fn.", 1)), f"{path.name} names {name}"


@cache
def _named(name):
    """The module of this name, or what a module or class has under it."""
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    inside, _, last = name.rpartition(".")
    return getattr(_named(inside), last)


def _computed(name):
    """What the program of a guide defines, and the rows of the tables of the guide, which should be what it computes."""
    path = _ROOT / "docs" / "guides" / name
    space = {"__name__": name}
    exec(compile(page_of(path).program(), str(path), "exec"), space)
    lines = path.read_text("utf-8").splitlines()
    return space, [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


@pytest.mark.nightly
def test_the_table_of_one_node_is_what_its_program_computes():
    space, rows = _computed("one-node.md")
    found = {row: cells for row, _, *cells in rows if row in space["ROWS"]}
    assert list(found) == list(space["ROWS"])
    for row, cells in found.items():
        plans = [space["needs"](row, grads) for grads in (None, space["torch"].bfloat16)]
        on_gpu = [f"{plan.memory.on_device / 1e9:.1f} ({plan.peak_nbytes / 1e9:.1f})" for plan in plans]
        assert cells == [*on_gpu, *(f"{8 * plan.host_nbytes / 1e12:.2f}" for plan in plans)], row


@pytest.mark.nightly
def test_the_tables_of_one_gpu_are_what_their_program_computes():
    space, rows = _computed("one-gpu.md")
    for model in space["MODELS"]:
        first, *needed = [cells for name, *cells in rows if name == model]
        plans = [space["needs"](model, way + 1) for way in range(len(space["WAYS"]))]
        assert first == [str(space["first_that_fits"](plans, *machine)) for machine in space["MACHINES"]]
        for way, (plan, cells) in enumerate(zip(plans, needed, strict=True), 1):
            disk = sum(nbytes for tier, nbytes in plan.memory.tiers.items() if tier.startswith("nvme"))
            gpu = f"{plan.memory.on_device / 1e9:,.1f} ({plan.peak_nbytes / 1e9:,.1f})"
            assert cells == [str(way), gpu, f"{plan.host_nbytes / 1e9:,.1f}", f"{disk / 1e9:,.1f}"], (model, way)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["7 B", "70 B", "175 B"])
def test_the_table_of_slow_links_is_what_its_program_computes(model):
    path = _ROOT / "docs" / "guides" / "slow-links.md"
    space = {"__name__": path.name}
    ((_, program),) = page_of(path).parsed
    exec(compile(program, str(path), "exec"), space)
    table = re.findall(
        r"^\| ([^|]+) \| (\w+), (\w+) \| [\d x/+]+ \| ([\d.]+) \| (.+) \|$", path.read_text("utf-8"), re.MULTILINE
    )
    assert len(table) == 12
    with space["torch"].device("meta"):
        psi = sum(p.numel() for p in space["Decoder"](*space["MODELS"][model]).parameters())
    number = ["7 B", "70 B", "175 B"].index(model)
    for stages, gather, reduce, exact, cells in table:
        for stage in stages.split(", "):
            nbytes = space["sent"](model, stage, gather, reduce)
            assert cells.split(" | ")[number] == f"{nbytes / 1e9:.2f}", (stage, gather, reduce)
            each = nbytes / (7 / 8 * psi / 8)  # ZeRO-3 gathers the last layer and the head once
            assert (0.98 if stage == "ZeRO-3" else 0.9999) < each / float(exact) < 1.0005, (stage, gather, reduce)


def test_the_readme_is_short():
    assert len((_ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
