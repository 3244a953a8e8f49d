"""Training commands, run from the repository root: `python -m train.imagenet`."""
