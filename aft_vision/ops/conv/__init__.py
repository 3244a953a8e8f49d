"""AFT-conv, and its form with one learned offset per head."""
