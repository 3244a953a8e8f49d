"""Command lines over the package, run from the repository root: `python -m tools.NAME`."""
