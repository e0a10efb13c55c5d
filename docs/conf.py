"""Sphinx over these pages, run by `.ci/docs`. Three pages of the reference are made of what the code and tests use."""

from __future__ import annotations

import base64
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import zero_fn  # noqa: E402
from zero_fn.deepspeed import keys  # noqa: E402

project = "zero_fn"
author = "zero_fn authors"
release = version = zero_fn.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"zero_fn {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build", "log"]
nb_execution_mode = "off"  # tests/outside/examples/test_notebooks.py executes lessons; their outputs are committed
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
toc_object_entries = False  # the headings of the reference name the objects already
napoleon_use_ivar = True  # attributes as one list
# Names of torch become links to its pages where the inventory of these is at hand: TORCH_INVENTORY is its file, or "online".
if torch_inventory := os.environ.get("TORCH_INVENTORY"):
    extensions.append("sphinx.ext.intersphinx")
    where = None if torch_inventory == "online" else str(Path(torch_inventory).resolve())
    intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", where)}
napoleon_custom_sections = ["Communicates", "Shapes", "Source"]
default_role = "code"

_SECTION = re.compile(r"(Args|Attributes|Communicates|Raises|Returns|Shapes|Source|Yields):$")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
"""A link to a file."""


def make_pages(app: Sphinx) -> None:
    """Writes docs/_generated: public names with their docstrings, errors, DeepSpeed keys."""
    folder = DOCS / "_generated"
    folder.mkdir(exist_ok=True)
    extract_pictures(folder)
    for name, text in {"api": names_page(), "errors": errors_page(), "deepspeed-keys": keys_page()}.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def extract_pictures(folder: Path) -> None:
    """Writes the pictures of the lessons as files: `3-what-a-step-does-1.png` is the first of lesson 3."""
    for lesson in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
        outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
        pictures = [data["image/png"] for data in outputs if "image/png" in data]
        for number, picture in enumerate(pictures, 1):
            (folder / f"{lesson.stem}-{number}.png").write_bytes(base64.b64decode("".join(picture)))


def names_page() -> str:
    """Every public name with its docstring: functions, then classes; then those of the namespaces."""
    parts = ["# Public names, with their docstrings\n"]
    values = {name: getattr(zero_fn, name) for name in zero_fn.__all__}
    for space in (name for name in dir(zero_fn) if isinstance(getattr(zero_fn, name), ModuleType)):
        module = getattr(zero_fn, space)
        values |= {f"{space}.{name}": getattr(module, name) for name in module.__all__ if name not in values}
    order = {name: ("." in name, inspect.isclass(value)) for name, value in values.items()}
    for name, value in sorted(values.items(), key=lambda item: order[item[0]]):
        if not callable(value):
            continue
        kind = "autofunction" if inspect.isfunction(value) else "autoclass"
        options = "" if inspect.isfunction(value) else "   :members:\n"
        parts.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: zero_fn.{name}\n{options}```\n")
    return "\n".join(parts)


def errors_page() -> str:
    """Every error that a test provokes, by its class, as a user reads it."""
    by_class: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests" / "errors" / "snapshots").glob("*.txt")):
        text = path.read_text(encoding="utf-8").strip("\n")
        error = re.match(r"(\w+)(: |\n|$)", text)
        by_class.setdefault(error[1] if error else "Others", []).append((path.stem.replace("_", " "), text))
    parts = [
        "# Errors\n\nEvery error with an example of its text, as the tests have it. The last line is what to do.\n"
    ]
    for name, examples in sorted(by_class.items()):
        parts.append(f"## {name}\n")
        parts += [f"### {title}\n\n````text\n{text}\n````\n" for title, text in examples]
    return "\n".join(parts)


def keys_page() -> str:
    """The table by which configs are read, `zero_fn.deepspeed.keys.KEYS`."""
    roles = {"read": "", "hint": "changes nothing: ", "refused": "only the default is taken; write instead: "}
    rows = [
        f"| `{key.path}` | {key.kind} | `{json.dumps(key.default)}` | {roles[key.role]}{_words(key.became)} |"
        for key in keys.KEYS.values()
    ]
    head = "# DeepSpeed keys\n\nEvery entry of a DeepSpeed config that `zf.from_deepspeed` knows, and what becomes of it.\n"
    return "\n".join([head, "| entry | holds | default | here |", "|---|---|---|---|", *rows, ""])


def _words(became: str | Mapping[str, str]) -> str:
    words = became if isinstance(became, str) else "; ".join(f"{value}: {text}" for value, text in became.items())
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def keep_layout(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are written to be read as they stand: indented examples and tables outside of sections stay as they are."""
    kept: list[str] = []
    is_section = is_literal = False
    for line in lines:
        is_indented = line.startswith(" ")
        if line and not is_indented:
            is_section = bool(_SECTION.match(line))
            is_literal = False
        elif is_indented and not is_section and not is_literal:
            before = kept.pop() if kept and not kept[-1] else None
            if not (kept and kept[-1].endswith("::")):
                kept += ["", "::"]
            kept.append("" if before is None else before)
            is_literal = True
        kept.append(line)
    lines[:] = kept


def lead_outside(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to files that are no pages: lessons are pages elsewhere; of others the path is shown.

    `[What is shown](../../notebooks/lesson.ipynb#picture-2)` becomes the second picture of the lesson.
    """
    here = (DOCS / f"{name}.md").parent

    def replaced(found: re.Match[str]) -> str:
        target = (here / found[2]).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            return found[0]
        if target.parent == ROOT / "notebooks" and (found[3] or "").startswith("#picture-"):
            return f"![{found[1]}](/_generated/{target.stem}-{found[3].removeprefix('#picture-')}.png)"
        if target.parent == ROOT / "notebooks":
            return f"{{doc}}`{found[1]} </lessons/{target.stem}>`"
        assert target.exists(), f"{name} links to {found[2]}, which is not there"
        return f"{found[1]} (`{target.relative_to(ROOT)}`)"

    if not name.startswith(("lessons/", "_generated/")):
        parts = re.split(r"(^```.*?^```$)", source[0], flags=re.MULTILINE | re.DOTALL)  # blocks have no links
        source[0] = "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Code that begins with a public name, such as `zf.plan(model)`, leads to its docstring; names of torch to its pages."""
    ours = app.env.domains.python_domain.objects
    inventory = getattr(app.env, "intersphinx_named_inventory", {}).get("torch", {})
    theirs = {
        name: item.uri
        for kind in ("function", "class", "method")
        for name, item in inventory.get(f"py:{kind}", {}).items()
    }
    for literal in list(doctree.findall(nodes.literal)):
        name = re.match(r"[\w.]*", literal.astext())[0].replace("zf.", "zero_fn.", 1)
        if isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        if name in ours and page != ours[name].docname:
            uri = f"{app.builder.get_relative_uri(page, ours[name].docname)}#{ours[name].node_id}"
        elif name in theirs:
            uri = theirs[name]
        else:
            continue
        literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=name in ours, refuri=uri))


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", link_names)
    app.connect("builder-inited", make_pages)
    app.connect("autodoc-process-docstring", keep_layout, priority=100)
    app.connect("source-read", lead_outside)
