"""Errors about damaged files, with their checksums."""

import hashlib
from pathlib import Path


def checksum(path: str | Path, algorithm: str = 'sha256') -> str:
    """Return the checksum of a file in hexadecimal, of any kind in hashlib."""
    with Path(path).open('rb') as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def damaged(path: str | Path, reason: object, algorithm: str = 'sha256', expected: str | None = None) -> ValueError:
    """Build the error for a damaged file.

    Args:
        expected: Its published checksum, if there is one.
    """
    wanted = f', expected {expected}' if expected else ''
    return ValueError(
        f'expected a whole file, got {path}: {reason}; its {algorithm} is {checksum(path, algorithm)}{wanted}'
    )
