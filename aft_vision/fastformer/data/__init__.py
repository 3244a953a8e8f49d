"""Texts with labels: readers of the published formats and of tables, splits, batches."""
