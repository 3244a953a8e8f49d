"""A lock between processes."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Only POSIX systems have it.
_fcntl: Any = importlib.import_module('fcntl') if os.name == 'posix' else None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, created if missing, and yield True, or yield False if locks are not supported.

    Not every operating system and network file system supports them. A lock is released when its process ends.
    """
    with path.open('w') as file:
        acquired = False
        if _fcntl is not None:
            with contextlib.suppress(OSError):
                _fcntl.flock(file, _fcntl.LOCK_EX)
                acquired = True
        yield acquired
