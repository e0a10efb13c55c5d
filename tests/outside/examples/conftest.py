"""One interpreter for all programs that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.outside.examples.programs import Interpreter


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    made = Interpreter(tmp_path_factory.mktemp("programs"))
    yield made
    made.close()
