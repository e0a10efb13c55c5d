"""`zero_fn.__all__` is the public interface: sorted, complete, documented, and the same as the table of the reference."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import zero_fn
from zero_fn import errors

_REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "names.md"


def _table(reference):
    """The names in the first column of the table of public names, which is the first of the page."""
    table, _, _ = reference.partition("\nBeside them:")
    return [name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


def test_public_names_are_sorted_and_unique():
    assert zero_fn.__all__ == sorted(set(zero_fn.__all__))


def test_public_names_are_all_that_the_package_imports():
    imported = {
        name for name, value in vars(zero_fn).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    # A function that is named like its file hides it: `zero_fn.check` is the function.
    assert set(zero_fn.__all__) == imported
    assert not any(isinstance(getattr(zero_fn, name), ModuleType) for name in zero_fn.__all__)


def test_every_error_is_public():
    assert set(errors.__all__) <= set(zero_fn.__all__)


@pytest.mark.parametrize("name", zero_fn.__all__)
def test_public_name_is_documented(name):
    value = getattr(zero_fn, name)
    text = value.__doc__ or ""
    assert text.strip(), f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclasses generate"
    if inspect.isfunction(value):
        undocumented = [
            parameter
            for parameter in inspect.signature(value).parameters
            if "Args:" in text and f"{parameter}:" not in text
        ]
        assert not undocumented, f"{name} does not say what these are: {undocumented}"


def test_public_names_are_those_of_the_reference():
    assert sorted(_table(_REFERENCE.read_text(encoding="utf-8"))) == zero_fn.__all__
