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
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing; the system releases it when the process ends.

    Not every system and network file system has locks. Without them, processes run at the same time.
    """
    with path.open('w') as file:
        if _fcntl is not None:
            with contextlib.suppress(OSError):
                _fcntl.flock(file, _fcntl.LOCK_EX)
        yield
