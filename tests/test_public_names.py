"""The public interface: `zero_fn.__all__` and the namespaces, documented, and the same as the tables of the reference."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import zero_fn
from zero_fn import errors

_REFERENCE = (Path(__file__).parents[1] / "docs" / "reference" / "names.md").read_text(encoding="utf-8")
_TOP, _NAMESPACES, _ERRORS = (table.split("\n\n")[0] for table in re.split(r"\|---\|---\|\n", _REFERENCE)[1:4])
NAMESPACES = {
    name: sorted(re.findall(r"`(\w+)`", text))
    for name, text in re.findall(r"^\| `zf\.(\w+)` \| (.*) \|$", _NAMESPACES, re.M)
}


def _first_column(table):
    return sorted(name for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in re.findall(r"`(\w+)`", row))


def test_public_names_are_those_of_the_reference():
    assert zero_fn.__all__ == _first_column(_TOP)
    assert len(zero_fn.__all__) <= 42
    assert sorted(set(errors.__all__) - {"ZeroError"}) == _first_column(_ERRORS)


def test_completion_shows_public_names_alone():
    assert dir(zero_fn) == sorted([*zero_fn.__all__, *NAMESPACES, "__version__"])
    assert not any(isinstance(getattr(zero_fn, name), ModuleType) for name in zero_fn.__all__)  # hidden by its file


@pytest.mark.parametrize("name", [name for name in NAMESPACES if name != "errors"])
def test_a_namespace_has_what_the_reference_says(name):
    names = getattr(zero_fn, name).__all__
    assert sorted({*names} - {*zero_fn.__all__} - {"KEYS", "Key"}) == NAMESPACES[name]  # others are at the top, too


VALUES = {
    **{name: getattr(zero_fn, name) for name in zero_fn.__all__},
    **{
        f"{space}.{name}": getattr(getattr(zero_fn, space), name)
        for space in NAMESPACES
        for name in getattr(zero_fn, space).__all__
        if name != "KEYS"
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_public_name_is_documented(name):
    value = VALUES[name]
    text = value.__doc__ or ""
    assert text.strip(), f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclasses generate"
    if inspect.isfunction(value):
        given = inspect.signature(value).parameters
        assert not [p for p in given.values() if p.kind is p.VAR_KEYWORD], f"{name} hides its signature"
        undocumented = [p for p in given if "Args:" in text and not re.search(rf"\b{p}\b[^:\n]*:", text)]
        assert not undocumented, f"{name} does not say what these are: {undocumented}"


def test_no_name_of_0_2_is_left():
    """No aliases: an old name is an AttributeError."""
    assert not [name for name in ("zero3", "held", "evict", "guard", "mirror", "int8") if hasattr(zero_fn, name)]
