"""The earlier name of `tools.report --only biases`."""

raise SystemExit('error: tools.visualize_bias is tools.report --only biases now')
