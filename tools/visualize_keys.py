"""The earlier name of `tools.report --only keys or --only attention`."""

raise SystemExit('error: tools.visualize_keys is tools.report --only keys or --only attention now')
