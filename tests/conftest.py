"""Garbage collections without what is imported: each training by transformers makes one, of half a second."""

import gc

# While all tests are imported, of which nothing becomes garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave out what is there before the tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up at its end."""
    gc.unfreeze()
