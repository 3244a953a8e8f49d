"""Garbage collections without what is imported: each training by transformers makes one, of half a second."""

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
        atexit.register(gc.unfreeze)
