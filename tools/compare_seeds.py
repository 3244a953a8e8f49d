"""The earlier name of `tools.compare_runs` for runs of texts."""

raise SystemExit('error: tools.compare_seeds is tools.compare_runs now, with the same arguments except --metrics')
