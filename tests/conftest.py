"""Garbage collections without what is imported: each training by transformers makes one, of half a second."""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests, of which nothing becomes garbage, and leave out what is there then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up at its end."""
    gc.unfreeze()
