"""Fixtures of the tests of the compiled kernels."""

import shutil

import pytest

from aft_vision.ops.common import build


@pytest.fixture(autouse=True)
def compiled() -> None:
    """The kernels have been built, where there is a compiler."""
    if shutil.which(build._chosen_compiler()[0]) is None:
        pytest.skip('there is no compiler here')
    assert build.library() is not None
