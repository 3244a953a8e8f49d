"""Fixtures of the tests of the trainers."""

from collections.abc import Iterator
from unittest import mock

import pytest
from helpers import leave_undrawn


@pytest.fixture(autouse=True, scope='package')
def undrawn() -> Iterator[None]:
    """Runs leave a file in place of their picture."""
    with mock.patch('matplotlib.figure.Figure.savefig', leave_undrawn):
        yield
