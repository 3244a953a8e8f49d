"""The table and the picture of several runs, which are gone."""

raise SystemExit(
    "error: tools.compare_runs is gone: read each run's result.json, and curves.png of train.char and others"
)
