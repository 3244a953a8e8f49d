"""Settings of all tests: few garbage collections, and no measured choices.

A collection of all that is imported takes half a second, and each training by transformers makes one.
"""

import atexit
import gc
from collections.abc import Generator, Iterator

import pytest

from aft_vision.ops import linear, operator


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests, of which nothing becomes garbage, and leave out what is there until the interpreter ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # A twentieth of the time of traces and interpreted kernels goes into collections at the default thresholds.
        gc.set_threshold(100_000, 20, 100)
        atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope='session')
def first_ways() -> Iterator[None]:
    """Let fused models compute in the same way on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, operator):
            patch.setattr(module, 'fastest', lambda subject, shape, ways: next(iter(ways)))
        yield
