"""AFT-simple."""
