"""Command lines over the package, `python -m tools.NAME` in a checkout, `aft-vision NAME` anywhere."""
