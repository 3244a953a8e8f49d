"""Runs that end without a drawing of their curves."""

from collections.abc import Iterator

import pytest
from helpers import leave_curves_undrawn


@pytest.fixture(scope='module', autouse=True)
def undrawn_curves() -> Iterator[None]:
    """Leave an empty curves.png, whose drawing takes as long as a small run; a test of each trainer draws it."""
    with pytest.MonkeyPatch.context() as patch:
        leave_curves_undrawn(patch)
        yield
