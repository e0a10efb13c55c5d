"""One interpreter for all programs that need none of their own."""

import pytest

from tests.outside.examples.programs import Interpreter


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory):
    made = Interpreter(tmp_path_factory.mktemp("programs"))
    yield made
    made.close()
