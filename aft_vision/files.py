"""Files of a run."""

from pathlib import Path

BEST, LAST = 'best.pth', 'last.pth'


def find_checkpoint(path: str | Path) -> Path:
    """Return the best checkpoint of the folder of a run; any other path as it is."""
    path = Path(path)
    best = path / BEST
    # An exported folder has a config.json.
    return best if best.is_file() and not (path / 'config.json').is_file() else path


def name_latest(folder: str | Path) -> str:
    """Return the end of an error about a folder without best.pth: where the newest checkpoint of its run is, or ''."""
    last = Path(folder) / LAST
    return f'; its newest checkpoint is {last}' if last.is_file() else ''
