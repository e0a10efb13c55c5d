"""Sphinx over these pages, run by `.ci/docs`. Three pages of the reference are made of what the code and tests use."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

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
exclude_patterns = ["_build", "log"]
nb_execution_mode = "off"  # lessons are executed by tests/examples/test_notebooks.py, and committed with their outputs
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = ["Communicates", "Shapes", "Source"]
default_role = "code"

_SECTION = re.compile(r"(Args|Attributes|Communicates|Raises|Returns|Shapes|Source|Yields):$")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
"""A link to a file."""


def make_pages(app: Sphinx) -> None:
    """Writes docs/_generated: public names with their docstrings, errors, DeepSpeed keys."""
    folder = DOCS / "_generated"
    folder.mkdir(exist_ok=True)
    for name, text in {"api": names_page(), "errors": errors_page(), "deepspeed-keys": keys_page()}.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def names_page() -> str:
    """Every public name with its docstring."""
    parts = ["# Public names, with their docstrings\n"]
    for name in zero_fn.__all__:
        value = getattr(zero_fn, name)
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
    """Links to files that are no pages: lessons are pages elsewhere; of others the path is shown."""
    here = (DOCS / f"{name}.md").parent

    def replaced(found: re.Match[str]) -> str:
        target = (here / found[2]).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            return found[0]
        if target.parent == ROOT / "notebooks":
            return f"{{doc}}`{found[1]} </lessons/{target.stem}>`"
        assert target.exists(), f"{name} links to {found[2]}, which is not there"
        return f"{found[1]} (`{target.relative_to(ROOT)}`)"

    if not name.startswith(("lessons/", "_generated/")):
        parts = re.split(r"(^```.*?^```$)", source[0], flags=re.MULTILINE | re.DOTALL)  # blocks have no links
        source[0] = "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", make_pages)
    app.connect("autodoc-process-docstring", keep_layout, priority=100)
    app.connect("source-read", lead_outside)
