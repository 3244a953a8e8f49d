"""AFT-axial: a position bias over rows and columns."""
