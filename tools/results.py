"""What tools read of a run that is complete."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_result(folder: Path, keys: Sequence[str], command: str) -> dict[str, Any]:
    """Read the result.json of a run.

    Args:
        keys: It has these at least.
        command: What left it, for the message of an error.

    Raises:
        ValueError: there is none, or it is of another kind.
    """
    path = folder / 'result.json'
    if not path.is_file():
        raise ValueError(f'expected the folder of a complete run, got {folder} without result.json')
    result = json.loads(path.read_text())
    missing = [key for key in keys if key not in result]
    if missing:
        raise ValueError(f'expected the result of a run of {command}, got {path} without {missing[0]}')
    return result
