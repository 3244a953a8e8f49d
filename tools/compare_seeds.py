"""The table and the picture of the seeds of runs of texts, which are gone."""

raise SystemExit("error: tools.compare_seeds is gone: read each run's result.json, with the metrics of every seed")
