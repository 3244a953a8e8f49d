"""The earlier name of `tools.report --only biases`, with the same options."""

import runpy
import sys

sys.argv[1:1] = ['--only', 'biases']
runpy.run_module('tools.report', run_name='__main__', alter_sys=True)
