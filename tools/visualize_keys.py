"""The earlier name of `tools.report --only keys`, or of `--only attention` with --query, with the same options."""

import runpy
import sys

sys.argv[1:1] = ['--only', 'attention' if '--query' in sys.argv else 'keys']
runpy.run_module('tools.report', run_name='__main__', alter_sys=True)
