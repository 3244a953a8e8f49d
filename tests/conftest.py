"""Few garbage collections, and none of what is imported: each training by transformers makes one, of half a second."""

import atexit
import gc
from collections.abc import Generator

import pytest


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
