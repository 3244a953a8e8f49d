"""Timing of operations, models and loaders against their alternatives."""
