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
    """Hold the lock of a file, which is made if it is missing, and yield True; False where there are no locks.

    Not every system and network file system has them. The system releases a lock when its process ends.
    """
    with path.open('w') as file:
        held = False
        if _fcntl is not None:
            with contextlib.suppress(OSError):
                _fcntl.flock(file, _fcntl.LOCK_EX)
                held = True
        yield held
