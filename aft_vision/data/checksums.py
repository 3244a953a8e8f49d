"""Files that are damaged are named with their checksums."""

import hashlib
from pathlib import Path


def checksum(path: str | Path, kind: str = 'sha256') -> str:
    """The checksum of a file, of a kind that hashlib knows, in hexadecimal."""
    with Path(path).open('rb') as file:
        return hashlib.file_digest(file, kind).hexdigest()


def damaged(path: str | Path, reason: object, kind: str = 'sha256', expected: str | None = None) -> ValueError:
    """The error for a file that is not what it should be.

    Args:
        expected: Its checksum as published, where there is one.
    """
    wanted = f', expected {expected}' if expected else ''
    return ValueError(f'expected a whole file, got {path}: {reason}; its {kind} is {checksum(path, kind)}{wanted}')


def check_length(path: str | Path, length: int) -> None:
    """Raise a ValueError unless a file has that many bytes."""
    found = Path(path).stat().st_size
    if found != length:
        raise damaged(path, f'it should have {length} bytes and has {found}')
