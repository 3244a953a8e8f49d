"""Files of a run."""

from pathlib import Path

BEST = 'best.pth'


def find_checkpoint(path: str | Path) -> Path:
    """Return the best checkpoint of the folder of a run; any other path as it is."""
    path = Path(path)
    best = path / BEST
    # An exported folder has a config.json.
    return best if best.is_file() and not (path / 'config.json').is_file() else path
