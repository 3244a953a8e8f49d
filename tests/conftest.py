"""Garbage collections without what was imported: each training by transformers makes one, of half a second."""

import gc


def pytest_collection_finish() -> None:
    """Leave out what is there before the tests."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter clean up at its end."""
    gc.unfreeze()
