"""AFT-full."""
