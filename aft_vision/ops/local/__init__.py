"""AFT-local."""
